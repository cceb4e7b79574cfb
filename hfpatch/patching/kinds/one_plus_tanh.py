"""Replaces a function inside one module's forward: 1 + tanh(x) becomes a bounded factor. `torch` stays as it is.

A pair of forward hooks enters a `TorchFunctionMode` for the module's own call, on this thread. The mode remembers
what tanh gave, through casts and changes of shape, and when 1 is added to that it gives 1 + delta(x) instead. Every
other tanh stays. Other modules called inside keep their own 1 + tanh (a GELU): where their code mentions tanh, a
second pair of hooks hides their additions from the mode.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode

from hfpatch.compat import dynamo, functions
from hfpatch.compat.autograd import version
from hfpatch.compat.frames import frame_at
from hfpatch.errors import RefusedError
from hfpatch.numerics.modulation import delta
from hfpatch.patching.tanh.one_plus import ADD, Tanh, Watch, one_and


class Bounding(Watch):
    """Gives 1 + delta(x) where 1 is added to tanh(x), in the call of one module.

    `caller` is the frame of that call. Once it is over the mode does nothing, whoever failed to take it off the
    thread's stack: torch runs no hook after a KeyboardInterrupt, nor one that was removed during the call.
    """

    def __init__(self, bounds: Bounded, module: nn.Module, caller: FrameType | None) -> None:
        super().__init__()
        self.bounds, self.module, self.caller = bounds, module, caller
        self.over = False
        self.versions: list[tuple[torch.Tensor, int]] = []
        self.made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, as `Watch` does while the call lasts."""
        if _is_over_now(self):
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _tanh(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        out = super()._tanh(func, name, args, kwargs)
        if not torch.compiler.is_compiling() and not torch.is_inference(self.seen[-1].argument):
            self.versions.append((self.seen[-1].argument, version(self.seen[-1].argument)))
        return out

    def before_change(self, tanh: Tanh) -> None:
        """Compute the factor while its argument is still there."""
        if all(argument is not tanh.argument for argument, _ in self.made):
            self.made.append((tanh.argument, self._delta(tanh.argument)))

    def one_plus(self, tanh: Tanh, run: Any) -> Any:
        """1 + delta(x), in shape and dtype of the sum it replaces."""
        if not torch.compiler.is_compiling():
            self._check(tanh)
        for argument, value in self.made:
            if argument is tanh.argument:
                return tanh.through(value) + 1
        return tanh.through(self._delta(tanh.argument)) + 1

    def _delta(self, x: torch.Tensor) -> torch.Tensor:
        return delta(x, self.bounds.low, self.bounds.high)

    def _check(self, tanh: Tanh) -> None:
        made = any(argument is tanh.argument for argument, _ in self.made)
        for argument, then in self.versions:
            if argument is tanh.argument and version(argument) != then and not made:
                raise RefusedError(
                    f"sigmoid-modulation: the argument of a tanh in {type(self.module).__name__} was overwritten "
                    "through a view before 1 was added to the result; revert the patch, or clone the argument"
                )
        frame: FrameType | None = frame_at(0)
        inside = False
        while frame is not None and frame is not self.caller:
            inside = inside or frame.f_code.co_filename == CHECKPOINT
            frame = frame.f_back
        if inside and frame is not None:
            raise RefusedError(
                f"sigmoid-modulation: the forward of {type(self.module).__name__} checkpoints the part of itself that "
                "has 1 + tanh, which would be recomputed without the patch; checkpoint the whole module from outside "
                "(model.gradient_checkpointing_enable() does), or put that part into a module of its own"
            )


class Blind(TorchFunctionMode):
    """Hides from the modes below it that 1 is added to a tensor they may know, while a call lasts."""

    def __init__(self, caller: FrameType | None) -> None:
        super().__init__()
        self.caller, self.over = caller, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function; a sum with 1 gets an alias of its tensor."""
        kwargs = kwargs or {}
        added = one_and(args, kwargs) if func.__name__ in ADD else None
        if added is not None and not _is_over_now(self):
            args = tuple(torch.ops.aten.alias(a) if a is added else a for a in args)
            kwargs = {k: torch.ops.aten.alias(v) if v is added else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


CHECKPOINT = torch.utils.checkpoint.__file__
NOT_COMPILED = (
    "sigmoid-modulation: this module calls torch.nn.functional.tanh, which torch.compile does not show to the patch; "
    "write torch.tanh there, or run it uncompiled (torch.compiler.disable)"
)


@dataclass(frozen=True)
class Bounded:
    """What the edit asks for: the factor's bounds.

    Args:
        low: Lower limit, below 1.
        high: Upper limit, above 1.
        eager: It cannot be compiled: it calls `torch.nn.functional.tanh`.
    """

    low: float
    high: float
    eager: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}, 1 at 0"


class Enter:
    """A forward pre-hook that enters a mode for the call; None for `bounds` hides instead."""

    def __init__(self, bounds: Bounded | None) -> None:
        self.bounds = bounds
        self.traced: list[TorchFunctionMode] = []  # of the call torch.compile is tracing: the stack is not to be read

    def __call__(self, module: nn.Module, _args: Any, kwargs: dict[str, Any] | None = None) -> None:
        """Enter; modes of calls that are over go first. Without `kwargs` it was taken off during this call."""
        if kwargs is None:
            return
        compiling = torch.compiler.is_compiling()
        if self.bounds is not None and self.bounds.eager and (compiling or dynamo.compiles_next()):
            raise RefusedError(NOT_COMPILED)
        if compiling:
            traced = Blind(None) if self.bounds is None else Bounding(self.bounds, module, None)
            traced.__enter__()
            self.traced.append(traced)
            return
        frame = frame_at(1)
        clear_over()
        mode = Blind(frame) if self.bounds is None else Bounding(self.bounds, module, frame)
        entered.modes = (*(m for m in entered.modes if not m.over), mode)
        functions.push(mode)


class Leave:
    """The forward hook that ends what an `Enter` began, also when forward raised."""

    def __init__(self, enter: Enter) -> None:
        self.enter = enter

    def __call__(self, module: nn.Module, _args: Any, _output: Any) -> None:
        """Leave, if the mode on top is the one that was entered for this call."""
        if torch.compiler.is_compiling():
            self.enter.traced.pop().__exit__(None, None, None)
            return
        top = clear_over()
        if isinstance(top, Blind) if self.enter.bounds is None else isinstance(top, Bounding) and top.module is module:
            functions.pop()
        if isinstance(top, (Bounding, Blind)):
            end(top)  # a frame keeps its tensors


def is_over(mode: Bounding | Blind) -> bool:
    """True if the call a mode was entered for is over: its frame is not on this thread's stack any more."""
    if mode.caller is not None:
        frame: FrameType | None = frame_at(1)
        while frame is not None and frame is not mode.caller:
            frame = frame.f_back
        if frame is None:
            end(mode)
    return mode.over


def _is_over_now(mode: Bounding | Blind) -> bool:
    """True if the call a mode was entered for is over; also asked by code that torch.compile traces."""
    if not torch.compiler.is_compiling():
        return is_over(mode)
    end_those_over()
    return mode.over


class _Entered(threading.local):
    modes: tuple[Bounding | Blind, ...] = ()


entered = _Entered()
"""The modes that this thread entered and that are not known to be over."""


@torch.compiler.assume_constant_result
def end_those_over() -> bool:
    """End the modes of this thread whose calls are over, and return True.

    torch.compile runs it once, while it traces code that cannot read Python's stack itself.
    """
    for mode in entered.modes:
        is_over(mode)
    return True


def end(mode: Bounding | Blind) -> None:
    """Let a mode do nothing any more, and keep nothing."""
    mode.over, mode.caller = True, None
    if isinstance(mode, Bounding):
        mode.seen, mode.versions, mode.made = [], [], []


def clear_over() -> Any:
    """Take modes of calls that are over off the top of this thread's stack. Returns what is on top then."""
    while isinstance(top := functions.topmost(), (Bounding, Blind)) and is_over(top):
        functions.pop()
    return top
