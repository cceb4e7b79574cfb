"""`hfpatch list`: all patches."""

from __future__ import annotations

from typing import Annotated

import typer

from hfpatch.cli.common import Json, broken_patch_files, show


def list_patches(
    architecture: Annotated[str | None, typer.Option(help="Only patches written for this model_type.")] = None,
    json: Json = False,
) -> None:
    """List the patches. Those of installed packages are listed from metadata: none of their code runs.

    JSON: `{"patches": [{id, title, architectures, effect, ...}], "installed": [{id, package, version, ...}]}`.
    """
    failed = broken_patch_files()
    from hfpatch.patching.catalogue import list_patches as found

    show(found(architecture), json)
    if failed:
        raise typer.Exit(2)
