"""Runs one kept call again under the watcher of operations, forward or with its backward pass.

Nothing of the model changes: gradients go nowhere, buffers and random numbers are put back.
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
"""What a model's code raises when it cannot be run a second time (`torch.OutOfMemoryError` is a RuntimeError)."""


@dataclass(frozen=True)
class Point:
    """A tensor of a call: which module, of what it was given or returned, and in which of the module's calls there."""

    module: str
    role: str
    name: str
    number: int


@dataclass(frozen=True)
class Replayed:
    """What a replay saw.

    Attributes:
        origin: The first operation whose bad values reached the tensor asked about; None if there was none.
        swallowed: The first origin that did not.
        tensor: That tensor; None after a backward replay.
        obstacle: Why there was no replay, in words; None if there was one.
    """

    origin: Origin | None = None
    swallowed: Origin | None = None
    tensor: torch.Tensor | None = None
    obstacle: str | None = None


def obstacle(call: Call) -> str | None:
    """Why a call cannot be made again; None if it can."""
    if any(is_sharded(p) for p in call.module.parameters()):
        return "its parameters are sharded over ranks: running it again would wait for the others"
    if call.overwritten:
        return "its input was overwritten in place since"
    return None


def forward(call: Call, point: Point, skip: set[str]) -> Replayed:
    """Run a call again.

    Args:
        call: The call.
        point: The tensor in it that is asked about.
        skip: Paths of modules in it whose outputs were measured and are finite: their operations are not looked at.
    """
    if why := obstacle(call):
        return Replayed(obstacle=why)
    args, kwargs = call.arguments()
    with _Where(call, skip, point) as where:
        operations = Operations(call.module, where, active=where.active, first_only=False)
        try:
            with call.as_it_was(), torch.inference_mode(call.inference), torch.no_grad(), operations:
                out = nn.Module.__call__(call.module, *args, **kwargs)
        except FAILURES as error:
            return Replayed(obstacle=f"running it again failed: {first_line(error)}")
    if point.module == call.path:
        where.take(out)
    if where.tensor is None:
        return Replayed(obstacle="run again, it did not come by there")
    reached = operations.marks(where.tensor)
    origins = operations.origins
    return Replayed(
        origin=origins[min(reached)] if reached else None,
        swallowed=next((o for n, o in enumerate(origins) if n not in reached), None),
        tensor=where.tensor,
    )


def backward(call: Call, factor: float = 1.0) -> Replayed:
    """Run a call and its backward pass again, from the gradients that its outputs got.

    Args:
        call: The call.
        factor: Gradients are multiplied by it first; `1 / scale` tells what they would be without a loss scale.
    """
    if why := obstacle(call):
        return Replayed(obstacle=why)
    if not call.grads:
        return Replayed(obstacle="no gradient of its outputs was seen")
    given: list[torch.Tensor] = []
    args, kwargs = (leaves(part, given) for part in call.arguments())
    parameters = [p for p in call.module.parameters() if p.requires_grad]
    with _Where(call, set(), None) as where:
        operations = Operations(call.module, where, active=where.in_backward, first_only=True)
        try:
            with call.as_it_was(), torch.enable_grad(), operations:
                out = dict(floating(nn.Module.__call__(call.module, *args, **kwargs)))
                where.own_nodes(out)
                pairs = [(out[n], g * factor) for n, g in call.grads.items() if n in out and out[n].requires_grad]
                wanted = [*given, *parameters]
                if not pairs or not wanted:
                    return Replayed(obstacle="running it again gave no graph to go back through")
                where.backward = True
                torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        except Found:
            return Replayed(origin=operations.origins[0])
        except FAILURES as error:
            return Replayed(obstacle=f"running it again failed: {first_line(error)}")
    return Replayed()


class _Where:
    """Knows, while a call is made again, which module's code runs."""

    def __init__(self, call: Call, skip: set[str], point: Point | None) -> None:
        self.call, self.skip, self.point = call, skip, point
        self.tensor: torch.Tensor | None = None
        self.backward = False
        self._left = point.number if point else 0
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

        asked = self.point.role if self.point is not None and self.point.module == path else None

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if asked == "input":
                self.take(args, kwargs)
            self._stack.append(path)
            self._skipping += path in self.skip
            given.append(_nodes((args, kwargs)))

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            if asked == "output":
                self.take(output)
            self._stack.pop()
            self._skipping -= path in self.skip
            self._returned.append((path, _nodes(output), given.pop()))

        self._handles.append(hooks.before(module, before, with_kwargs=True))
        self._handles.append(hooks.after(module, after))

    def take(self, *values: Any) -> None:
        """Keep the tensor that is asked about, if this is the call it is in."""
        if self.point is not None and self._left == 0:
            self.tensor = next((t for value in values for n, t in floating(value) if n == self.point.name), None)
        self._left -= 1

    def own_nodes(self, out: dict[str, torch.Tensor]) -> None:
        """Say for every backward function whose module's code it belongs to: what lies between a module's outputs
        and inputs and in none of its own children, which returned before it.
        """
        taken: set[Any] = set()
        for path, ends, starts in [*self._returned, (self.call.path, _nodes(out), set[Any]())]:
            for node in _between(ends, starts, taken):
                self._tell(node, path)

    def _tell(self, node: Any, path: str) -> None:
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
    """Arguments with every tensor that needs a gradient replaced by a leaf, which is added to `found`."""
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
    """What other code raised, without what follows its first line."""
    return str(error).partition("\n")[0]
