"""`hfpatch doctor`: facts, hazards, room, plan, proof, and which way to run a checkpoint here, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hfpatch.cli.common import (
    Json,
    TrustRemoteCode,
    broken_patch_files,
    quiet_transformers,
    read_text,
    say_missing,
    show,
    torch_device,
)
from hfpatch.errors import InputError
from hfpatch.report.sheet import say


def doctor(
    model: Annotated[
        str, typer.Argument(help="A local directory, or a hub name in the local cache.", show_default=False)
    ],
    text: Annotated[
        str | None, typer.Option(help="Text file to run, - for stdin. Default: a built-in text.", show_default=False)
    ] = None,
    tokens: Annotated[int, typer.Option(help="Run at most this many tokens.")] = 64,
    args: Annotated[
        Path | None, typer.Option(help="JSON or YAML file of training arguments, as for check.", show_default=False)
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1. Default: a GPU if there is one.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the page to this HTML file too.", show_default=False)] = None,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Examine a checkpoint on text: facts, hazards, room, plan, proof, and which way to run it here and why.

    Exit 1 if there is a problem: a hazard, a patch that is needed and refused, or no finite way but float32.

    JSON: `{"advice", "best", "facts", "hazards", "rooms", "plan", "proof", "lifted", "ways", "paste"}`.
    """
    if tokens < 2:
        raise InputError(f"--tokens {tokens}: want at least 2, a loss needs two")
    if html is not None and (html.is_dir() or not html.parent.is_dir()):
        raise InputError(f"cannot write {html}: want a file in a directory that exists")
    words = read_text(text, tokens)
    from hfpatch.guarding.checking.settings import settings_file

    given = None if args is None else settings_file(args)
    broken_patch_files()
    quiet_transformers()
    import torch

    from hfpatch.doctoring.budget import check_memory
    from hfpatch.doctoring.doctor import doctor as examine
    from hfpatch.model.source import build_on_meta, load_config
    from hfpatch.tracing.checkpoint import load

    chosen = torch_device(device)
    config = load_config(model, trust_remote_code=trust_remote_code)
    check_memory(model, build_on_meta(config, trust_remote_code=trust_remote_code), chosen)
    checkpoint = load(model, dtype=torch.float32, device=chosen, trust_remote_code=trust_remote_code)
    say_missing(checkpoint.missing)
    found = examine(checkpoint.model, given, batch=checkpoint.batch(words, tokens, loss=True))
    show(found, json)
    if html is not None:
        found.to_html(html)
        say([f"hfpatch: wrote {html}"])
    if found:
        raise typer.Exit(1)
