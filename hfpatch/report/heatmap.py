"""A heat map as data; `page.py` and `png.py` render it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hfpatch.report import scale
from hfpatch.report.files import write_atomically
from hfpatch.report.sheet import Sheet


@dataclass(frozen=True)
class Cell:
    """One cell of a heat map.

    Attributes:
        value: Largest finite magnitude; None if nothing finite was measured.
        limit: Largest finite value of the tensor's dtype.
        bad: True if a tensor of the block holds a NaN or an infinity.
        facts: Names and values that are shown on a click.
    """

    value: float | None
    limit: float
    bad: bool
    facts: tuple[tuple[str, str], ...]

    @property
    def room(self) -> float | None:
        """Doublings left before the limit, infinite for 0; None if nothing finite was measured."""
        return None if self.value is None else scale.doublings(self.value, self.limit)

    @property
    def band(self) -> int | None:
        """Index of its colour in `scale`; None for a bad cell and for one that was not measured."""
        return None if self.bad or self.room is None else scale.band(self.room)

    @property
    def short(self) -> str:
        """The magnitude in at most six characters; a cross if it is bad; empty if it was not measured."""
        if self.bad:
            return "×"
        if self.value is None:
            return ""
        if self.value == 0 or 0.01 <= self.value < 9999.5:
            return f"{self.value:.3g}" if self.value < 999.5 else f"{self.value:.0f}"
        mantissa, exponent = f"{self.value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"

    @property
    def sentence(self) -> str:
        """Description of the cell, in a sentence."""
        limit = f"{self.limit:,.0f}" if self.limit < 1e6 else f"{self.limit:.4g}"
        if self.value is None or self.room is None:
            return "Nothing finite was measured." if self.bad else "Nothing was measured."
        room = "all zero" if self.value == 0 else f"{self.room:.1f} doublings left to {limit}"
        held = " Holds NaN or Inf; this is the largest of the rest." if self.bad else ""
        return f"max |x| {self.value:,.6g}: {room}.{held}"


@dataclass(frozen=True)
class Heatmap:
    """Magnitudes of tensors in rows and columns, coloured by how near each is to the limit of its dtype.

    Attributes:
        title: One line.
        rows: Paths of modules, in the order they ran.
        columns: Passes, such as `step 0` and `step 0 backward`.
        cells: The cells by row and column; a missing one was not measured.
        first_bad: Row and column of the first fault; None if there is none.
        notes: Lines above the map: the findings, and what to try.
        sheets: Tables below the map.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[int, int], Cell]
    first_bad: tuple[int, int] | None
    notes: tuple[str, ...]
    sheets: tuple[Sheet, ...]

    def to_html(self) -> str:
        """Return a page that needs no other file and no network; a click or Enter on a cell shows its facts."""
        from hfpatch.report.page import render

        return render(self)

    def to_png(self, path: str | Path) -> None:
        """Write the map as a PNG, atomically; tables are left out.

        Raises:
            InputError: matplotlib is missing, or the file cannot be written.
        """
        from hfpatch.report.png import draw

        write_atomically(path, draw(self))
