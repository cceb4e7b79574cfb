"""`hfpatch explain`: all there is to know of a patch."""

from __future__ import annotations

from typing import Annotated

import typer

from hfpatch.cli.common import Json, show


def explain(
    patch: Annotated[str, typer.Argument(help="Its id, as `hfpatch list` shows it.", show_default=False)],
    json: Json = False,
) -> None:
    """Say what a patch mends, what it changes and costs, its limits, cases and sources."""
    from hfpatch.patching.catalogue import explain as found

    show(found(patch), json)
