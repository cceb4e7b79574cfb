"""`hfpatch new`: the beginning of a patch."""

from __future__ import annotations

from typing import Annotated

import typer


def new(
    name: Annotated[
        str,
        typer.Argument(metavar="FAMILY/DEFECT", help="Folder and file, e.g. gemma2/logit-cap.", show_default=False),
    ],
    package: Annotated[
        str | None,
        typer.Option(help="Write a new package of this name in the current directory, not a file of this checkout."),
    ] = None,
) -> None:
    """Write the beginning of a patch: a file that loads and does nothing yet. No file is overwritten."""
    from hfpatch.patching.registering.new_patch import new_patch

    written = new_patch(name, package)
    for path in written:
        print(f"wrote {path}")
    patch_id = written[-1].stem.replace("_", "-")
    where = f"after `pip install -e {package}`: " if package else ""
    print(f"next: fill in each TODO; {where}hfpatch verify {patch_id}")
