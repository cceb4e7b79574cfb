"""A heat map as a PNG, drawn on one axis over the whole picture, in inches from the top left corner."""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING, Any

from hfpatch.errors import InputError
from hfpatch.report import scale
from hfpatch.report.grid import Grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


DPI = 160
INK, SOFT, PALE, MARK = "#1b1c1f", "#5d6069", "#c9ccd3", "#0757d6"
POINT = 1 / 72
ADVANCE = 0.66 * POINT
"""Width in inches of a character of DejaVu Sans Mono, which matplotlib ships, per point of its size: 0.602 points, plus
rounding to whole pixels."""
SMALL, TEXT, TITLE = 7.0, 8.5, 12.0
PAD, GAP = 0.25, 0.08
LONGEST = 48
FLAG = 1.0
"""Width in inches on the right, for the words beside the first bad row."""


def draw(shown: Grid) -> bytes:
    """Return the heat map as bytes of a PNG.

    Raises:
        InputError: matplotlib is missing.
    """
    rows, columns = max(1, len(shown.rows)), max(1, len(shown.columns))
    high = min(_between(0.08, 11.5 / rows, 0.26), 40 / rows)
    wide = min(_between(0.13, 9.0 / columns, 0.5), 60 / columns)
    left = PAD + _width(max((_fit(name) for name in shown.rows), key=len, default=""), SMALL) + GAP
    width = max(8.0, left + wide * columns + FLAG + PAD)
    head = _wrap([shown.title], width, TITLE)
    notes = _wrap(shown.notes, width, TEXT)
    slanted = any(_width(_fit(name), SMALL) > wide - 0.05 for name in shown.columns)
    labels = max((_width(_fit(name), SMALL) for name in shown.columns), default=0.0) if slanted else SMALL * POINT
    words = PAD + _lines(head, TITLE) + _lines(notes, TEXT)
    top = words + 0.12 + labels + GAP
    bottom = top + high * rows
    height = bottom + 0.2 + LEGEND + PAD

    figure = blank(width, height)
    axes = figure.add_axes((0, 0, 1, 1), frameon=False)
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.autoscale(enable=False)
    pen = _Pen(axes)
    pen.paragraph(head, PAD, PAD, TITLE, INK, bold=True)
    pen.paragraph(notes, PAD, PAD + _lines(head, TITLE), TEXT, INK)
    if shown.rows and shown.columns:
        _cells(pen, shown, left, top, wide, high)
        _labels(pen, shown, left, top, wide, high, slanted)
    else:
        pen.write("Nothing was measured.", PAD, top, TEXT, SOFT)
    _legend(pen, shown.measure, PAD, bottom + 0.2)
    return as_png(figure, shown.title)


def blank(width: float, height: float) -> Figure:
    """Return a white figure of so many inches.

    Raises:
        InputError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] != "matplotlib":
            raise
        raise InputError("a PNG is drawn by matplotlib, which is not installed: pip install hfpatch[plot]") from missing
    return Figure(figsize=(width, height), dpi=DPI, facecolor="white")


def as_png(figure: Figure, title: str) -> bytes:
    """Return a figure as bytes of a PNG with this title."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    out = io.BytesIO()
    FigureCanvasAgg(figure).print_png(out, metadata={"Title": plain(title)})
    return out.getvalue()


class _Pen:
    """Draws on one axis, independent of the user's matplotlib settings; text is never parsed as a formula."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes

    def write(self, text: str, x: float, y: float, size: float, colour: str, **how: Any) -> None:
        style: dict[str, Any] = {"ha": "left", "va": "center", "family": "DejaVu Sans Mono", **how}
        self.axes.text(x, y, plain(text), fontsize=size, color=colour, parse_math=False, usetex=False, **style)

    def paragraph(self, lines: list[str], x: float, y: float, size: float, colour: str, bold: bool = False) -> None:
        for index, line in enumerate(lines):
            at = y + (index + 0.5) * _leading(size)
            self.write(line, x, at, size, colour, weight="bold" if bold else "normal")

    def boxes(self, places: list[tuple[float, float]], colours: list[str], wide: float, high: float) -> None:
        from matplotlib.collections import PolyCollection

        inset = min(wide, high) * 0.04
        corners = [
            [(x + inset, y + inset), (x + wide - inset, y + inset), (x + wide - inset, y + high - inset),
             (x + inset, y + high - inset)]
            for x, y in places
        ]  # fmt: skip
        self.axes.add_collection(PolyCollection(corners, facecolors=colours, edgecolors="none", antialiaseds=False))

    def lines(self, segments: list[list[tuple[float, float]]], colour: str, width: float) -> None:
        from matplotlib.collections import LineCollection

        self.axes.add_collection(LineCollection(segments, colors=colour, linewidths=width))

    def crosses(self, places: list[tuple[float, float]], wide: float, high: float) -> None:
        reach = min(wide, high) * 0.26
        segments: list[list[tuple[float, float]]] = []
        for x, y in places:
            at, down = x + wide / 2, y + high / 2
            segments.append([(at - reach, down - reach), (at + reach, down + reach)])
            segments.append([(at - reach, down + reach), (at + reach, down - reach)])
        self.lines(segments, scale.ink(scale.LIGHT_BAD), 0.9)

    def slashes(self, places: list[tuple[float, float]], wide: float, high: float) -> None:
        reach = min(wide, high) * 0.26
        middles = [(x + wide / 2, y + high / 2) for x, y in places]
        self.lines([[(x - reach, y + reach), (x + reach, y - reach)] for x, y in middles], PALE, 0.8)

    def frame(self, x: float, y: float, wide: float, high: float) -> None:
        from matplotlib.patches import Rectangle

        for grow, colour, line in ((0.01, MARK, 2.6), (-0.014, "white", 0.9)):  # white separates it from a black cell
            corner = (x - grow, y - grow)
            size = (wide + 2 * grow, high + 2 * grow)
            self.axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor=colour, linewidth=line, zorder=4))


def _cells(pen: _Pen, shown: Grid, left: float, top: float, wide: float, high: float) -> None:
    def place(row: int, column: int) -> tuple[float, float]:
        return left + column * wide, top + row * high

    every = {(r, c): shown.cells.get((r, c)) for r in range(len(shown.rows)) for c in range(len(shown.columns))}
    coloured = {at: cell for at, cell in every.items() if cell and cell.band is not None}
    bad = [at for at, cell in every.items() if cell and cell.bad]
    missing = [at for at, cell in every.items() if not cell or (not cell.bad and cell.band is None)]
    pen.boxes(
        [place(*at) for at in (*coloured, *bad)],
        [*(scale.LIGHT[cell.band or 0] for cell in coloured.values()), *[scale.LIGHT_BAD] * len(bad)],
        wide,
        high,
    )
    pen.crosses([place(*at) for at in bad], wide, high)
    pen.slashes([place(*at) for at in missing], wide, high)
    if wide > _width("1.2e-7", 6) and high > 6 * POINT * 1.3:
        for at, cell in coloured.items():
            x, y = place(*at)
            ink = scale.ink(scale.LIGHT[cell.band or 0])
            pen.write(cell.short, x + wide / 2, y + high / 2, 6, ink, ha="center", va="center_baseline")
    if shown.first_bad:
        x, y = place(*shown.first_bad)
        pen.frame(x, y, wide, high)
        # beside the map, so that no cell is covered
        end = left + len(shown.columns) * wide
        pen.write("◂ first bad", end + GAP, y + high / 2, SMALL + 1, MARK, weight="bold")


def _labels(
    pen: _Pen, shown: Grid, left: float, top: float, wide: float, high: float, slanted: bool
) -> None:  # fmt: skip
    hit = shown.first_bad or (-1, -1)
    for row in _thinned(len(shown.rows), high, hit[0]):
        colour, weight = (MARK, "bold") if row == hit[0] else (SOFT, "normal")
        at = top + (row + 0.5) * high
        pen.write(_fit(shown.rows[row]), left - GAP, at, SMALL, colour, ha="right", weight=weight)
    for column in _thinned(len(shown.columns), wide if slanted else 1.0, hit[1]):
        colour, weight = (MARK, "bold") if column == hit[1] else (SOFT, "normal")
        how = {"rotation": 90, "va": "bottom"} if slanted else {"va": "bottom"}
        at = left + (column + 0.5) * wide
        pen.write(_fit(shown.columns[column]), at, top - GAP, SMALL, colour, ha="center", weight=weight, **how)


def _thinned(count: int, size: float, keep: int) -> list[int]:
    """Return the indices of evenly spaced labels that fit, and `keep` instead of those too near to it."""
    every = max(1, -int(-SMALL * POINT * 1.25 // size))
    return [i for i in range(count) if i == keep or (i % every == 0 and (keep < 0 or abs(i - keep) >= every))]


LEGEND = 0.62


def _legend(pen: _Pen, measure: str, x: float, y: float) -> None:
    wide, high = 0.27, 0.17
    pen.write(measure.rstrip(":"), x, y + 0.08, SMALL, SOFT)
    y += 0.22
    pen.boxes([(x + i * wide, y) for i in range(scale.BANDS)], list(scale.LIGHT), wide, high)
    for index, colour in enumerate(scale.LIGHT):
        text = str(index) if index < scale.BANDS - 1 else f"{index}+"
        pen.write(text, x + (index + 0.5) * wide, y + high / 2, SMALL - 1, scale.ink(colour), ha="center")
    at = x + scale.BANDS * wide + 0.2
    pen.boxes([(at, y)], [scale.LIGHT_BAD], wide, high)
    pen.crosses([(at, y)], wide, high)
    pen.write("NaN or Inf", at + wide + 0.07, y + high / 2, SMALL, SOFT)
    at += wide + 0.07 + _width("NaN or Inf", SMALL) + 0.15
    pen.slashes([(at, y)], wide, high)
    pen.write("not measured", at + wide, y + high / 2, SMALL, SOFT)


def _between(least: float, value: float, most: float) -> float:
    return max(least, min(value, most))


def _width(text: str, size: float) -> float:
    return len(text) * size * ADVANCE


def _leading(size: float) -> float:
    return size * POINT * 1.45


def _lines(lines: list[str], size: float) -> float:
    return len(lines) * _leading(size) + 0.06


def _wrap(texts: list[str] | tuple[str, ...], width: float, size: float) -> list[str]:
    characters = int((width - 2 * PAD) / (size * ADVANCE))
    return [line for text in texts for part in text.splitlines() or [""] for line in textwrap.wrap(part, characters)]


def _fit(name: str) -> str:
    """Return a name shortened at its start: the end of a path tells layers apart."""
    return name if len(name) <= LONGEST else "…" + name[1 - LONGEST :]


def plain(text: str) -> str:
    """Return text with characters that cannot be printed replaced."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
