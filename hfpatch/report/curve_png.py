"""A curve as a PNG: a panel for each pass."""

from __future__ import annotations

import math
import textwrap
from typing import Any

from hfpatch.report.png import INK, LONGEST, SOFT, as_png, blank, plain
from hfpatch.report.series import Series

RMS, LARGEST, LIMIT = "#0757d6", "#b4531a", "#b8152b"


def draw(shown: Series) -> bytes:
    """Return the curve as bytes of a PNG.

    Raises:
        InputError: matplotlib is missing.
    """
    count = max(1, len(shown.rows))
    width = min(20.0, max(8.0, 0.26 * count + 3))
    head = [line for text in (shown.title, *shown.notes) for line in textwrap.wrap(plain(text), int(width * 12))]
    panels = max(1, len(shown.lines))
    top = 0.3 + 0.2 * len(head)
    high = 3.0
    label = 0.075 * min(LONGEST, max((len(row) for row in shown.rows), default=0)) + 0.3
    height = top + panels * (high + 0.4) + label
    figure = blank(width, height)
    for index, line in enumerate(head):
        figure.text(0.02, 1 - (0.25 + 0.2 * index) / height, line, color=INK, fontsize=9, parse_math=False)
    for index, line in enumerate(shown.lines):
        bottom = 1 - (top + (index + 1) * (high + 0.4) - 0.1) / height
        axes: Any = figure.add_axes((0.9 / width, bottom, 1 - 2.6 / width, high / height))
        low, most = shown.decades(line)
        places = range(len(shown.rows))
        axes.set_yscale("log")
        axes.set_ylim(10.0**low, 10.0**most)
        axes.set_xlim(-0.5, count - 0.5)
        for values, colour, how in ((line.largest, LARGEST, "--"), (line.rms, RMS, "-")):
            found = [(at, value) for at, value in enumerate(values) if value]
            axes.plot([at for at, _ in found], [v for _, v in found], color=colour, linestyle=how, linewidth=1.4)
        for name, value in shown.limits:
            if low <= math.log10(value) <= most:
                axes.axhline(value, color=LIMIT, linestyle=":", linewidth=1)
                axes.text(count - 0.4, value, name, color=LIMIT, fontsize=7, va="center", parse_math=False)
        for at, bad in enumerate(line.bad):
            if bad:
                axes.text(at, 10.0**most, "×", color=LIMIT, ha="center", va="top", fontsize=10)
        if shown.first_bad is not None:
            axes.axvspan(shown.first_bad - 0.5, shown.first_bad + 0.5, color=LIMIT, alpha=0.1, linewidth=0)
        axes.set_title(f"{line.name}: RMS (solid), largest magnitude (dashed)", fontsize=9, color=INK, loc="left")
        every = max(1, math.ceil(0.14 * count / (width - 2.6)))
        marks = [i for i in places if i % every == 0 or i == shown.first_bad]
        last = index == len(shown.lines) - 1
        axes.set_xticks(marks)
        names = [plain(shown.rows[i])[-LONGEST:] for i in marks] if last else [""] * len(marks)
        axes.set_xticklabels(names, rotation=90, fontsize=7, color=SOFT, parse_math=False)
        axes.tick_params(axis="y", labelsize=7, colors=SOFT)
        axes.grid(visible=True, axis="y", linewidth=0.3)
    if not (shown.rows and shown.lines):
        figure.text(0.02, 0.1, "Nothing was measured.", color=SOFT, fontsize=9)
    return as_png(figure, shown.title)
