"""A heat map that can be shown, as a page or as a picture; `page.py` and `png.py` render it."""

from __future__ import annotations

from pathlib import Path

from hfpatch.report.files import write_atomically
from hfpatch.report.frame import frame
from hfpatch.report.grid import Grid
from hfpatch.report.page import render
from hfpatch.report.png import draw


class Heatmap(Grid):
    """Magnitudes of tensors in rows and columns, coloured by how near each is to the limit of its dtype."""

    def to_html(self) -> str:
        """Return a page that needs no other file and no network; a click or Enter on a cell shows its facts."""
        return render(self)

    def to_frame(self) -> str:
        """Return the page as an element of a notebook."""
        return frame(self.to_html())

    def to_png(self, path: str | Path) -> None:
        """Write the map as a PNG, atomically; tables are left out.

        Raises:
            InputError: matplotlib is missing, or the file cannot be written.
        """
        write_atomically(path, draw(self))
