"""A heat map as data; `page.py` and `png.py` draw it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hfpatch.report import scale
from hfpatch.report.sheet import Sheet


@dataclass(frozen=True)
class Cell:
    """One place of a heat map.

    Attributes:
        value: Largest finite magnitude; None if nothing finite was measured.
        limit: Largest finite value of the tensor's dtype.
        bad: It holds something that is not finite and is not meant.
        facts: Names and values that a click shows.
        relative: True if `limit` is no limit but the largest value of the pass.
    """

    value: float | None
    limit: float
    bad: bool
    facts: tuple[tuple[str, str], ...]
    relative: bool = False

    @property
    def room(self) -> float | None:
        """Doublings left before the limit, infinite for 0; None if nothing finite was measured."""
        return None if self.value is None else scale.doublings(self.value, self.limit)

    @property
    def band(self) -> int | None:
        """Which colour of `scale` it has; None for a bad cell and for one that was not measured."""
        return None if self.bad or self.room is None else scale.band(self.room)

    @property
    def short(self) -> str:
        """The magnitude in six characters or fewer, a cross if it is bad, else nothing."""
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
        """What it says, in words."""
        limit = f"{self.limit:,.0f}" if self.limit < 1e6 else f"{self.limit:.4g}"
        if self.value is None or self.room is None:
            return "Nothing finite was measured." if self.bad else "Nothing was measured."
        left = "below" if self.relative else "left to"
        room = "all zero" if self.value == 0 else f"{self.room:.1f} doublings {left} {limit}"
        held = " Holds NaN or Inf; this is the largest of the rest." if self.bad else ""
        return f"max |x| {self.value:,.6g}: {room}.{held}"


@dataclass(frozen=True)
class Grid:
    """Magnitudes of tensors in rows and columns, coloured by how near each is to what its dtype can hold.

    Attributes:
        title: One line.
        rows: Paths of modules, in the order they ran.
        columns: Passes, such as `step 0` and `step 0 backward`.
        cells: By row and column; a place that is not in it was not measured.
        first_bad: Row and column where it goes wrong.
        notes: Lines above the map: the finding, what to try.
        sheets: Tables below it.
        measure: What the colours mean.
        details: Tables below it that unfold: the modules in each block.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[int, int], Cell]
    first_bad: tuple[int, int] | None
    notes: tuple[str, ...]
    sheets: tuple[Sheet, ...]
    measure: str = "max |x|, in doublings left to the limit of its dtype, log2(limit / max |x|):"
    details: tuple[Sheet, ...] = ()
