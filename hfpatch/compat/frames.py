# Python has no public way to a frame further up without a list of all of them
# pyright: reportPrivateUsage=false
"""Frames of Python's stack.

`inspect.currentframe` is `sys._getframe` behind one call more, and hfpatch asks at each function of a patched forward.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import nn

from hfpatch.compat.modules import RUNS

frame_at = sys._getframe
"""Return the frame so many calls up; of 0, that of the caller of this function. Bound, for code that asks often."""


def module_of(frame: FrameType) -> nn.Module | None:
    """Return the module whose call a frame is, with its hooks and forward; None of any other frame."""
    return frame.f_locals.get("self") if frame.f_code.co_name == RUNS else None


def raised_in(error: BaseException, module: nn.Module) -> list[nn.Module]:
    """Return the modules whose forwards an exception went through, the given one first; empty if it began elsewhere.

    Args:
        error: An exception that is being handled.
        module: The module whose call handles it, to run the hooks that are always called.
    """
    frames = [module_of(frame) for frame, _ in _frames(error.__traceback__)]
    return [m for m in frames if m is not None] if frames and frames[0] is module else []


def line_of(error: BaseException) -> str:
    """Return the innermost line outside of torch that an exception went through: `modeling_llama.py:181 (x @ y)`."""
    own = Path(torch.__file__).parent
    where = ""
    for frame, number in _frames(error.__traceback__):
        file = Path(frame.f_code.co_filename)
        if not file.is_relative_to(own):
            code = linecache.getline(str(file), number, frame.f_globals).strip()
            code = f"{code[:77]}..." if len(code) > 80 else code
            where = f"{file.name}:{number}" + (f" ({code})" if code else "")
    return where


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
