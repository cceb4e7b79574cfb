# Python has no public way to a frame further up without a list of all of them
# pyright: reportPrivateUsage=false
"""Frames of Python's stack.

`inspect.currentframe` is `sys._getframe` behind one call more, and hfpatch asks at each function of a patched forward.
"""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn

from hfpatch.compat.modules import RUNS

frame_at = sys._getframe
"""Return the frame so many calls up; of 0, that of the caller of this function. Bound, for code that asks often."""


def module_of(frame: FrameType) -> nn.Module | None:
    """Return the module whose call a frame is, with its hooks and forward; None of any other frame."""
    return frame.f_locals.get("self") if frame.f_code.co_name == RUNS else None
