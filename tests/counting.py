"""How much work something is, as a count that no busy machine changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from types import FrameType


def calls(work: Callable[[], object]) -> int:
    """Number of functions, Python's and C's, that are called on the way."""
    counted = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    was = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(was)
    return counted


def longest_silence(work: Callable[[Callable[[object], None]], object]) -> tuple[int, int]:
    """Most calls between two signs that the work gives by the function that it is handed, and the number of signs."""
    marks: list[int] = []
    counted = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    def sign(_: object) -> None:
        marks.append(counted)

    was = sys.getprofile()
    sys.setprofile(count)
    try:
        work(sign)
    finally:
        sys.setprofile(was)
    return max(b - a for a, b in pairwise([0, *marks, counted])), len(marks)
