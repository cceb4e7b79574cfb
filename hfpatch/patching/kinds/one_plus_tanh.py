"""Replaces 1 + tanh(x) with a bounded factor inside one module's forward. `torch` itself is not changed.

A pair of forward hooks enters a `TorchFunctionMode` for the module's own call, on this thread. The mode remembers the
results of tanh, through casts and changes of shape, and when 1 is added to one it returns 1 + delta(x) instead. Every
other tanh stays. Modules called inside keep their own 1 + tanh (a GELU): if their code mentions tanh, a second pair
of hooks hides their additions from the mode.
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
    """Returns 1 + delta(x) where 1 is added to tanh(x), during the call of one module.

    `caller` is the frame of that call. Once the call is over the mode does nothing, even if it is still on the
    thread's stack: torch runs no hook after a KeyboardInterrupt, nor a hook that was removed during the call.
    """

    def __init__(self, bounds: Bounded, module: nn.Module, caller: FrameType | None) -> None:
        super().__init__()
        self.bounds, self.module, self.caller = bounds, module, caller
        self.over = False
        self.versions: list[tuple[torch.Tensor, int]] = []
        self.made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function; after the end of the call, without any change."""
        if _is_over_now(self):
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _tanh(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        out = super()._tanh(func, name, args, kwargs)
        if not torch.compiler.is_compiling() and not torch.is_inference(self.seen[-1].argument):
            self.versions.append((self.seen[-1].argument, version(self.seen[-1].argument)))
        return out

    def before_change(self, tanh: Tanh) -> None:
        """Compute the factor before its argument is overwritten."""
        if all(argument is not tanh.argument for argument, _ in self.made):
            self.made.append((tanh.argument, self._delta(tanh.argument)))

    def one_plus(self, tanh: Tanh, run: Any) -> Any:
        """Return 1 + delta(x), in the shape and dtype of the sum that it replaces."""
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
                    "through a view before 1 was added to the result; clone the argument, or revert the patch"
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
    """Hides additions of 1 from the modes below it on the stack, during the call of one module."""

    def __init__(self, caller: FrameType | None) -> None:
        super().__init__()
        self.caller, self.over = caller, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function; an addition of 1 gets an alias of its tensor, which the modes below do not recognise."""
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
    """The bounds of the factor.

    Args:
        low: Lower limit, below 1.
        high: Upper limit, above 1.
        eager: True if the module cannot be compiled, because it calls `torch.nn.functional.tanh`.
    """

    low: float
    high: float
    eager: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}, 1 at 0"


class Enter:
    """A forward pre-hook that enters a mode for the call: `Bounding`, or `Blind` if `bounds` is None."""

    def __init__(self, bounds: Bounded | None) -> None:
        self.bounds = bounds
        self.traced: list[TorchFunctionMode] = []  # of the call torch.compile is tracing: the stack is not to be read

    def __call__(self, module: nn.Module, _args: Any, kwargs: dict[str, Any] | None = None) -> None:
        """Enter the mode. Without `kwargs` the hook was removed during this call.

        Raises:
            RefusedError: The module is compiled, but calls `torch.nn.functional.tanh`.
        """
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
    """The forward hook that leaves the mode of an `Enter`, even if forward raised an error."""

    def __init__(self, enter: Enter) -> None:
        self.enter = enter

    def __call__(self, module: nn.Module, _args: Any, _output: Any) -> None:
        """Leave the mode, if the one on top of the stack is that of this call."""
        if torch.compiler.is_compiling():
            self.enter.traced.pop().__exit__(None, None, None)
            return
        top = clear_over()
        if isinstance(top, Blind) if self.enter.bounds is None else isinstance(top, Bounding) and top.module is module:
            functions.pop()
        if isinstance(top, (Bounding, Blind)):
            end(top)  # a frame keeps its tensors


def is_over(mode: Bounding | Blind) -> bool:
    """True if the call that a mode was entered for is over: its frame is no longer on this thread's stack."""
    if mode.caller is not None:
        frame: FrameType | None = frame_at(1)
        while frame is not None and frame is not mode.caller:
            frame = frame.f_back
        if frame is None:
            end(mode)
    return mode.over


def _is_over_now(mode: Bounding | Blind) -> bool:
    """True if the call that a mode was entered for is over; works while torch.compile traces too."""
    if not torch.compiler.is_compiling():
        return is_over(mode)
    end_those_over()
    return mode.over


class _Entered(threading.local):
    modes: tuple[Bounding | Blind, ...] = ()


entered = _Entered()
"""The modes of this thread whose calls are not known to be over."""


@torch.compiler.assume_constant_result
def end_those_over() -> bool:
    """End the modes of this thread whose calls are over, and return True.

    torch.compile runs it once while tracing, because traced code cannot read Python's stack.
    """
    for mode in entered.modes:
        is_over(mode)
    return True


def end(mode: Bounding | Blind) -> None:
    """Make a mode do nothing from now on, and drop the tensors that it holds."""
    mode.over, mode.caller = True, None
    if isinstance(mode, Bounding):
        mode.seen, mode.versions, mode.made = [], [], []


def clear_over() -> Any:
    """Pop modes of finished calls off this thread's stack. Returns the mode on top afterwards."""
    while isinstance(top := functions.topmost(), (Bounding, Blind)) and is_over(top):
        functions.pop()
    return top
