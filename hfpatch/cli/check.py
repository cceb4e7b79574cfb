"""`hfpatch check`: hazards in training this model with these arguments. Needs no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hfpatch.cli.common import Json, Model, TrustRemoteCode, quiet_transformers, show


def check(
    model: Model,
    args: Annotated[
        Path | None,
        typer.Option(help="JSON or YAML file of training arguments, such as TRL's configs.", show_default=False),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1. Default: a GPU if there is one.", show_default=False)
    ] = None,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Look for hazards in the combination of a model and training arguments; exit 1 if there are any.

    JSON: `{"model", "hazards": [{id, certain, reason, change}], "remarks"}`.
    """
    from hfpatch.guarding.checking.settings import settings_file

    given = None if args is None else settings_file(args)  # checked before torch is imported
    quiet_transformers()
    from hfpatch.guarding.checking.hazards import check as look
    from hfpatch.model.source import build_on_meta, load_config

    built = build_on_meta(load_config(model, trust_remote_code=trust_remote_code), trust_remote_code=trust_remote_code)
    found = look(built, given, device=device)
    show(found, json)
    if found:
        raise typer.Exit(1)
