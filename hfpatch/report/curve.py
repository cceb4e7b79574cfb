"""A curve that can be shown, as a page, as a picture, or in a notebook."""

from __future__ import annotations

from pathlib import Path

from hfpatch.report.curve_page import render
from hfpatch.report.curve_png import draw
from hfpatch.report.files import write_atomically
from hfpatch.report.frame import frame
from hfpatch.report.series import Series


class Curve(Series):
    """RMS and largest magnitude by row, on a logarithmic axis, with the limits of dtypes as lines."""

    def to_html(self) -> str:
        """Return a page that needs no other file, no network and no script."""
        return render(self)

    def to_frame(self) -> str:
        """Return the page as an element of a notebook."""
        return frame(self.to_html())

    def to_png(self, path: str | Path) -> None:
        """Write the curve as a PNG, atomically; tables are left out.

        Raises:
            InputError: matplotlib is missing, or the file cannot be written.
        """
        write_atomically(path, draw(self))
