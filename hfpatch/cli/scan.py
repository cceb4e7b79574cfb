"""`hfpatch scan`: check safetensors files."""

from __future__ import annotations

from typing import Annotated

import typer

from hfpatch.cli.common import Json, show


def scan(
    path: Annotated[
        str,
        typer.Argument(
            help="A safetensors file, a directory, an index of shards, or a hub name in the local cache.",
            show_default=False,
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="For a saved adapter: the model (a hub name, directory or config.json) that its tensors must fit.",
            show_default=False,
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            help="Number of processes. Default: 1 below 4 GiB, else one per core, at most 4.", show_default=False
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check for NaN, Inf, broken or missing shards, and values that float16 cannot hold; exit 1 if a fault is found.

    With --model, tensors of a saved adapter that do not land in that model are faults too, and the report names the
    renaming that would make them land. Nothing is written, and no pickle is read. Values that float16 cannot hold,
    all-zero tensors and outliers are noted, but are no fault.

    JSON: `{"path", "files", "findings": [{kind, file, tensor, text, figures}], "notes": [the same],
    "census": {dtype: {tensors, parameters, bytes}}}`.
    """
    from hfpatch.report.progress import progress
    from hfpatch.scanning.layout import total_bytes
    from hfpatch.scanning.scan import scan as run

    with progress("scanning", total_bytes(path)) as advance:
        report = run(path, model=model, processes=processes, progress=advance)
    show(report, json)
    if report.findings:
        raise typer.Exit(1)
