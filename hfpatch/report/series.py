"""A curve over the blocks of a model, as data; `curve_page.py` and `curve_png.py` draw it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hfpatch.report.sheet import Sheet


@dataclass(frozen=True)
class Line:
    """The figures of one pass, one for each row; None where nothing finite was measured.

    Attributes:
        name: `forward` or `backward`.
        rms: Root mean squares.
        largest: Largest finite magnitudes.
        bad: True where something is not finite.
    """

    name: str
    rms: tuple[float | None, ...]
    largest: tuple[float | None, ...]
    bad: tuple[bool, ...]


@dataclass(frozen=True)
class Series:
    """Figures by row, and the limits they are seen against.

    Attributes:
        title: One line.
        rows: Paths of modules, in the order they ran.
        lines: One for each pass.
        limits: Name and value of each limit of a dtype.
        first_bad: The row where it goes wrong.
        notes: Lines above the curve.
        details: A table for each block: the modules in it.
    """

    title: str
    rows: tuple[str, ...]
    lines: tuple[Line, ...]
    limits: tuple[tuple[str, float], ...]
    first_bad: int | None
    notes: tuple[str, ...]
    details: tuple[Sheet, ...]

    def decades(self, line: Line) -> tuple[int, int]:
        """Return the lowest and the highest power of 10 of the axis of a line: at most three beyond its values.

        Limits farther away are not drawn, or the curve would be flat.
        """
        values = [v for v in (*line.rms, *line.largest) if v]
        low = math.floor(math.log10(min(values))) if values else 0
        high = math.ceil(math.log10(max(values))) if values else 1
        high = max(high, low + 1)
        near = [math.log10(limit) for _, limit in self.limits]
        above = [math.ceil(n) for n in near if high - 1 <= n <= high + 3]
        below = [math.floor(n) for n in near if low - 3 <= n <= low + 1]
        return min([low, *below]), max([high, *above])
