"""`hfpatch explain`: the documentation of a patch."""

from __future__ import annotations

from typing import Annotated

import typer

from hfpatch.cli.common import Json, show


def explain(
    patch: Annotated[str, typer.Argument(help="Id of the patch, as in `hfpatch list`.", show_default=False)],
    json: Json = False,
) -> None:
    """Explain a patch: the defect it fixes, its changes and cost, its limits, cases and sources."""
    from hfpatch.patching.catalogue import explain as found

    show(found(patch), json)
