"""`hfpatch scan`: look through safetensors files."""

from __future__ import annotations

from typing import Annotated

import typer

from hfpatch.cli.common import Json, show


def scan(
    path: Annotated[
        str, typer.Argument(help="A safetensors file, a directory, or an index of shards.", show_default=False)
    ],
    processes: Annotated[
        int | None, typer.Option(help="Processes that read; one up to a GiB, else one a core.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Look for NaN, Inf, broken or missing shards, and what float16 cannot hold; exit 1 if something is wrong.

    Nothing is written, and no pickle is read. Values that float16 cannot hold, tensors of nothing but zeros and
    outliers are told, and are no fault.
    """
    from hfpatch.report.progress import progress
    from hfpatch.scanning.scan import scan as run
    from hfpatch.scanning.scan import total_bytes

    with progress("scanning", total_bytes(path)) as advance:
        report = run(path, processes=processes, progress=advance)
    show(report, json)
    if report:
        raise typer.Exit(1)
