"""Which module's code runs while a call is run again, forward and backward.

autograd numbers the backward functions of a thread in the order in which forward makes them, so the module whose code
ran when a number was given is the one that owns the function.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.compat import autograd, hooks
from hfpatch.tracing.calls import Call
from hfpatch.tracing.tensors import floating

SELECTS = {
    "Where": "where()",
    "MaskedFill": "masked_fill()",
    "MaskedScatter": "masked_scatter()",
    "MaskedSelect": "masked_select()",
    "NanToNum": "nan_to_num()",
    "Clamp": "clamp()",
    "ClampMin": "clamp()",
    "ClampMax": "clamp()",
    "Maximum": "maximum()",
    "Minimum": "minimum()",
    "IndexPut": "an indexed assignment",
    "Index": "an index",
}
"""Backward functions, without `Backward0`, that give values which forward dropped a gradient of 0; each in words."""


@dataclass(frozen=True)
class Target:
    """The place of a tensor in a kept call.

    Attributes:
        module: Path of the module of which it is an input or output.
        role: `input` or `output`.
        name: Its name there, as in `Event.name`.
        number: Calls of the module before this one, within the kept call.
    """

    module: str
    role: str
    name: str
    number: int


class Owners:
    """Tracks which module's code runs while a call is run again. A context: its hooks are on the modules inside it.

    Args:
        call: The call.
        skip: Paths of modules whose operations are not to be watched.
        target: The tensor to keep; None for none.

    Attributes:
        tensor: The target, once it has occurred.
    """

    def __init__(self, call: Call, skip: set[str], target: Target | None) -> None:
        self.call, self.skip, self.target = call, skip, target
        self.tensor: torch.Tensor | None = None
        self._left = target.number if target else 0
        self._stack: list[str] = [call.path]
        self._skipping = 0
        self._numbers: list[int] = []  # of the next backward function, at each entry to and exit from a module
        self._paths: list[str | None] = []
        self._end: int | None = None  # the first number that forward did not give
        self._outer = call.path
        self._users: dict[int, list[Any]] = {}
        self._handles: list[hooks.Handle] = []
        self._note(call.path)

    def __call__(self) -> tuple[str, str]:
        """Return the path of the module whose code runs, and the name of the backward function it runs in, or ""."""
        node = autograd.running_node() if self._end is not None else None
        if node is None:
            return self._stack[-1], ""
        path = self._owner(node)
        if torch.is_grad_enabled():  # forward code that a checkpoint runs again
            return (self._stack[-1] if len(self._stack) > 1 else path), ""
        return path, autograd.name_of(node)

    def active(self) -> bool:
        """Return True unless the code of a skipped module runs."""
        return self._skipping == 0

    def __enter__(self) -> Owners:
        for name, module in self.call.module.named_modules(prefix=self.call.path):
            if module is not self.call.module:
                self._follow(name.removeprefix("."), module)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def begin_backward(self, outputs: Iterable[torch.Tensor]) -> bool:
        """Note that forward is over; return True if its graph holds a reentrant checkpoint.

        Args:
            outputs: The outputs of the call, with their graphs.
        """
        self._end = autograd.next_number()
        self._note(None)
        pending = [t.grad_fn for t in outputs if t.grad_fn is not None]
        seen: set[int] = set()
        reentrant = False
        while pending:
            node = pending.pop()
            if (number := autograd.number_of(node)) in seen:
                continue
            seen.add(number)
            reentrant = reentrant or autograd.is_reentrant_checkpoint(node)
            for inner, _ in node.next_functions:
                if inner is not None:
                    self._users.setdefault(autograd.number_of(inner), []).append(node)
                    pending.append(inner)
        return reentrant

    def selecting(self) -> str:
        """Return the nearest operation that takes part of the running backward function's result; "" if none does."""
        node = autograd.running_node()
        pending, seen = deque([node] if node is not None else []), set[int]()
        while pending:
            number = autograd.number_of(pending.popleft())
            for user in self._users.get(number, ()):
                if words := SELECTS.get(user.name().rpartition("Backward")[0]):
                    return words
                if autograd.number_of(user) not in seen:
                    seen.add(autograd.number_of(user))
                    pending.append(user)
        return ""

    def capture(self, *values: Any) -> None:
        """Keep the target tensor, if this is the module's call that it belongs to."""
        if self.target is not None and self._left == 0:
            self.tensor = next((t for value in values for n, t in floating(value) if n == self.target.name), None)
        self._left -= 1

    def _follow(self, path: str, module: nn.Module) -> None:
        asked = self.target.role if self.target is not None and self.target.module == path else None

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if asked == "input":
                self.capture(args, kwargs)
            self._stack.append(path)
            self._skipping += path in self.skip
            self._note(path)

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            if asked == "output":
                self.capture(output)
            self._stack.pop()
            self._skipping -= path in self.skip
            self._note(self._stack[-1] if len(self._stack) > 1 or self._end is None else None)

        self._handles.append(hooks.before(module, before, with_kwargs=True))
        self._handles.append(hooks.after(module, after))

    def _note(self, path: str | None) -> None:
        self._numbers.append(autograd.next_number())
        self._paths.append(path)

    def _owner(self, node: Any) -> str:
        """Return the module whose code made a backward function; for one that backward made, that of the outer one."""
        number = autograd.number_of(node)
        path = self._paths[bisect_right(self._numbers, number) - 1]
        if self._end is not None and number < self._end and path is not None:
            self._outer = path
        return path if path is not None else self._outer
