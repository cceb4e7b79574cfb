"""Replays one kept call while its operations are watched: forward only, or with its backward pass.

The model does not change: no gradients are accumulated, and buffers and random state are put back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.compat import hooks
from hfpatch.tracing.calls import Call
from hfpatch.tracing.operations import Found, Operations, Origin
from hfpatch.tracing.tensors import DEPTH, floating, is_sharded

FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError)
"""Exceptions from model code that cannot be run a second time (`torch.OutOfMemoryError` is a RuntimeError)."""


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


@dataclass(frozen=True)
class Replayed:
    """The result of a replay.

    Attributes:
        origin: The first operation whose bad values reached the target tensor; None if there was none.
        swallowed: The first origin whose bad values did not reach it; None if there was none.
        tensor: The target tensor; None after a backward replay.
        obstacle: Why the call could not be replayed; None if it was.
    """

    origin: Origin | None = None
    swallowed: Origin | None = None
    tensor: torch.Tensor | None = None
    obstacle: str | None = None


def obstacle(call: Call) -> str | None:
    """Return why a call cannot be replayed; None if it can."""
    if any(is_sharded(p) for p in call.module.parameters()):
        return "its parameters are sharded over ranks: running it again would wait for the others"
    if call.overwritten:
        return "its input was overwritten in place since"
    return None


def forward(call: Call, target: Target, skip: set[str]) -> Replayed:
    """Replay a call.

    Args:
        call: The call.
        target: The place of the target tensor.
        skip: Paths of modules in it whose outputs were measured and are finite: their operations are not watched.
    """
    if why := obstacle(call):
        return Replayed(obstacle=why)
    args, kwargs = call.arguments()
    with _Where(call, skip, target) as where:
        operations = Operations(call.module, where, active=where.active, first_only=False)
        try:
            with call.as_it_was(), torch.inference_mode(call.inference), torch.no_grad(), operations:
                out = nn.Module.__call__(call.module, *args, **kwargs)
        except FAILURES as error:
            return Replayed(obstacle=f"running it again failed: {first_line(error)}")
    if target.module == call.path:
        where.capture(out)
    if where.tensor is None:
        return Replayed(obstacle="when the block was run again, this tensor did not occur")
    reached = operations.marks(where.tensor)
    origins = operations.origins
    return Replayed(
        origin=origins[min(reached)] if reached else None,
        swallowed=next((o for n, o in enumerate(origins) if n not in reached), None),
        tensor=where.tensor,
    )


def backward(call: Call, factor: float = 1.0) -> Replayed:
    """Replay a call and its backward pass, starting from the gradients of its outputs.

    Args:
        call: The call.
        factor: Factor on those gradients; `1 / scale` replays the pass without a loss scale.
    """
    if why := obstacle(call):
        return Replayed(obstacle=why)
    if not call.grads:
        return Replayed(obstacle="no gradient of its outputs was recorded")
    given: list[torch.Tensor] = []
    args, kwargs = (leaves(part, given) for part in call.arguments())
    parameters = [p for p in call.module.parameters() if p.requires_grad]
    with _Where(call, set(), None) as where:
        operations = Operations(call.module, where, active=where.in_backward, first_only=True)
        try:
            with call.as_it_was(), torch.enable_grad(), operations:
                out = dict(floating(nn.Module.__call__(call.module, *args, **kwargs)))
                where.assign_nodes(out)
                pairs = [(out[n], g * factor) for n, g in call.grads.items() if n in out and out[n].requires_grad]
                wanted = [*given, *parameters]
                if not pairs or not wanted:
                    return Replayed(obstacle="when the block was run again, its outputs had no autograd graph")
                where.backward = True
                torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        except Found:
            return Replayed(origin=operations.origins[0])
        except FAILURES as error:
            return Replayed(obstacle=f"running it again failed: {first_line(error)}")
    return Replayed()


class _Where:
    """Tracks which module's code runs while a call is replayed."""

    def __init__(self, call: Call, skip: set[str], target: Target | None) -> None:
        self.call, self.skip, self.target = call, skip, target
        self.tensor: torch.Tensor | None = None
        self.backward = False
        self._left = target.number if target else 0
        self._stack: list[str] = [call.path]
        self._skipping = 0
        self._node = ""
        self._owner = call.path
        self._returned: list[tuple[str, set[Any], set[Any]]] = []
        self._handles: list[Any] = []

    def __call__(self) -> tuple[str, str]:
        return (self._owner, self._node) if self.backward else (self._stack[-1], "")

    def active(self) -> bool:
        return self._skipping == 0

    def in_backward(self) -> bool:
        return self.backward

    def __enter__(self) -> _Where:
        for name, module in self.call.module.named_modules(prefix=self.call.path):
            if module is not self.call.module:
                self._follow(name.removeprefix("."), module)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _follow(self, path: str, module: nn.Module) -> None:
        given: list[set[Any]] = []

        asked = self.target.role if self.target is not None and self.target.module == path else None

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if asked == "input":
                self.capture(args, kwargs)
            self._stack.append(path)
            self._skipping += path in self.skip
            given.append(_nodes((args, kwargs)))

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            if asked == "output":
                self.capture(output)
            self._stack.pop()
            self._skipping -= path in self.skip
            self._returned.append((path, _nodes(output), given.pop()))

        self._handles.append(hooks.before(module, before, with_kwargs=True))
        self._handles.append(hooks.after(module, after))

    def capture(self, *values: Any) -> None:
        """Keep the target tensor, if this is the module's call that it belongs to."""
        if self.target is not None and self._left == 0:
            self.tensor = next((t for value in values for n, t in floating(value) if n == self.target.name), None)
        self._left -= 1

    def assign_nodes(self, out: dict[str, torch.Tensor]) -> None:
        """Assign every backward function to a module: the innermost one between whose inputs and outputs it lies.

        Children returned before their parents, so they take their functions first.
        """
        taken: set[Any] = set()
        for path, ends, starts in [*self._returned, (self.call.path, _nodes(out), set[Any]())]:
            for node in _between(ends, starts, taken):
                self._assign(node, path)

    def _assign(self, node: Any, path: str) -> None:
        def before(_grads: Any) -> None:
            self._owner, self._node = path, str(node.name())

        self._handles.append(node.register_prehook(before))


def _nodes(values: Any) -> set[Any]:
    return {t.grad_fn for _, t in floating(values) if t.grad_fn is not None}


def _between(ends: set[Any], starts: set[Any], taken: set[Any]) -> Iterator[Any]:
    pending = list(ends)
    while pending:
        node = pending.pop()
        if node is None or node in taken or node in starts:
            continue
        taken.add(node)
        yield node
        pending.extend(inner for inner, _ in node.next_functions)


def leaves(value: Any, found: list[torch.Tensor], depth: int = DEPTH) -> Any:
    """Return arguments with each tensor that requires a gradient replaced by a leaf, which is added to `found`."""
    if isinstance(value, torch.Tensor):
        if not value.requires_grad:
            return value
        leaf = value.detach().requires_grad_()
        found.append(leaf)
        return leaf
    if depth == 0:
        return value
    if type(value) in (list, tuple):
        return type(value)(leaves(part, found, depth - 1) for part in value)
    if type(value) is dict:
        return {key: leaves(part, found, depth - 1) for key, part in value.items()}
    return value


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message."""
    return str(error).partition("\n")[0]
