"""A curve as a self-contained HTML page without scripts: an SVG for each pass, and tables that unfold."""

from __future__ import annotations

import base64
import hashlib
import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from hfpatch.report.series import Line, Series

if TYPE_CHECKING:
    from jinja2 import Template

HERE = Path(__file__).parent
LEFT, RIGHT, TOP, HIGH = 64, 150, 16, 240
"""Of the drawing, in pixels: margins for the axis, for the names of limits, above it, and its height."""
STEP, LEAST, MOST = 26, 420, 1400
"""Width for each row, and the least and the largest width of all."""


def render(shown: Series) -> str:
    """Return the page; its content security policy allows only its own style, by hash."""
    style = (HERE / "curve.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return _template().render(
        shown=shown, style=style, policy=policy, panels=[_panel(shown, line) for line in shown.lines]
    )


def _panel(shown: Series, line: Line) -> dict[str, object]:
    """Return what the template draws for one pass, in pixels."""
    count = max(1, len(shown.rows))
    width = min(MOST, max(LEAST, STEP * count))
    low, high = shown.decades(line)

    def across(index: int) -> float:
        return round(LEFT + (index + 0.5) * width / count, 1)

    def down(value: float) -> float:
        return round(TOP + (high - math.log10(value)) / (high - low) * HIGH, 1)

    every = max(1, (high - low) // 8)
    ticks = [(f"1e{n}", round(TOP + (high - n) / (high - low) * HIGH, 1)) for n in range(low, high + 1, every)]
    limits = [(name, down(value)) for name, value in shown.limits if low <= math.log10(value) <= high]
    points = [
        {
            "x": across(i),
            "y": down(largest) if largest else None,
            "row": row,
            "bad": bad,
            "says": f"{row}: RMS {rms or 0:.4g}, largest {largest or 0:.4g}{', holds NaN or Inf' if bad else ''}",
            "first": i == shown.first_bad,
        }
        for i, (row, rms, largest, bad) in enumerate(zip(shown.rows, line.rms, line.largest, line.bad, strict=True))
    ]
    thin = max(1, math.ceil(14 * count / width))
    label = min(46, max((len(row) for row in shown.rows), default=0))
    return {
        "name": line.name,
        "left": LEFT,
        "right": LEFT + width,
        "width": LEFT + width + RIGHT,
        "bottom": TOP + HIGH,
        "top": TOP,
        "height": TOP + HIGH + 7 * label + 12,
        "ticks": ticks,
        "limits": limits,
        "rms": _points([(across(i), down(v)) if v else None for i, v in enumerate(line.rms)]),
        "largest": _points([(across(i), down(v)) if v else None for i, v in enumerate(line.largest)]),
        "points": points,
        "labels": [p for i, p in enumerate(points) if i % thin == 0 or p["first"]],
        "column": round(width / count, 1),
    }


def _points(points: list[tuple[float, float] | None]) -> str:
    """Return the points that there are, as SVG writes them."""
    return " ".join(f"{point[0]},{point[1]}" for point in points if point is not None)


@cache
def _template() -> Template:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string((HERE / "curve.html").read_text(encoding="utf-8"))
