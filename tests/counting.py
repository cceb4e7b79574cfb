"""How much work something is, as a count that no busy machine changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
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
