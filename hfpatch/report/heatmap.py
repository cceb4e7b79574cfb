"""A heat map that can be shown, as a page or as a picture."""

from __future__ import annotations

from pathlib import Path

from hfpatch.report.files import write_atomically
from hfpatch.report.grid import Grid
from hfpatch.report.page import render
from hfpatch.report.png import draw


class Heatmap(Grid):
    """Magnitudes of tensors in rows and columns, coloured by how near each is to what its dtype can hold."""

    def to_html(self) -> str:
        """One page that needs no other file and no network; a click, or Enter, on a cell shows its facts."""
        return render(self)

    def to_png(self, path: str | Path) -> None:
        """Write the same as a picture, whole or not at all; tables are left out.

        Raises:
            InputError: matplotlib is missing, or the file cannot be written.
        """
        write_atomically(path, draw(self))
