"""The colours of a heat map: one band for each doubling that a value has left to the limit of its dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence

BANDS = 17
"""Number of bands. Band n is for n to n + 1 doublings left; the last is for 16 or more."""


def doublings(value: float, limit: float) -> float:
    """Return how often a magnitude can double before it exceeds the limit; infinite for 0, never negative."""
    return max(0.0, math.log2(limit / value)) if value > 0 else math.inf


def band(room: float) -> int:
    """Return the band for this many doublings, 0 to `BANDS` - 1."""
    return int(min(room, BANDS - 1))


def luminance(colour: str) -> float:
    """Return the relative luminance of `#rrggbb` as defined by WCAG 2, 0 to 1."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in _channels(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ink(colour: str) -> str:
    """Return black or white, whichever is easier to read on a colour."""
    return "#000000" if luminance(colour) > 0.179 else "#ffffff"


def _channels(colour: str) -> list[float]:
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def _ramp(stops: Sequence[str]) -> tuple[str, ...]:
    """Return `BANDS` colours, evenly spaced by linear interpolation between the stops."""
    colours: list[str] = []
    for index in range(BANDS):
        at = index / (BANDS - 1) * (len(stops) - 1)
        left = min(int(at), len(stops) - 2)
        pairs = zip(_channels(stops[left]), _channels(stops[left + 1]), strict=True)
        colours.append("#" + "".join(f"{round(255 * (a + (b - a) * (at - left))):02x}" for a, b in pairs))
    return tuple(colours)


# The order shows in lightness alone, so it is visible with colour blindness and in a grey print. Values near the limit
# stand out: dark on a light page, light on a dark one; bad values have the most extreme colour.
LIGHT = _ramp(("#6d0019", "#b8152b", "#e5503a", "#fb8f5a", "#fdbb84", "#fcdcb8", "#f8f0e6"))
LIGHT_BAD = "#0b0b0d"
DARK = _ramp(("#ffe08a", "#ffb347", "#f0803c", "#c9532f", "#8a3a33", "#592e33", "#33292d"))
DARK_BAD = "#ffffff"
