"""A kept call run again, forward and backward, with the size of what went into and came out of each operation.

Operations are seen as Python calls them (`softmax`, `layer_norm`, `/`), by a function mode, and their gradients at the
backward functions that they left in autograd's graph. The model does not change.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hfpatch.compat import hooks
from hfpatch.model.norms import acts_as_norm, eps_of
from hfpatch.tracing.calls import Call
from hfpatch.tracing.rerun_block import FAILURES, first_line, leaves, obstacle
from hfpatch.tracing.tensors import floating, local

FUSED_NORMS = {"layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"}
GIVEN = -1
"""In `Ran.sources`: an argument of the call."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a tensor: RMS, largest and smallest magnitude, number of elements; its name if it is a parameter."""

    rms: float
    largest: float
    least: float
    count: int
    name: str = ""


@dataclass(slots=True)
class Ran:
    """An operation that ran.

    Attributes:
        name: Of the function: `div`, `softmax`, `layer_norm`; of a custom autograd Function, its class.
        path: The module whose code ran it.
        operands: Its floating-point tensor arguments.
        sources: For each of them, the operation that made it: an index of `Followed.ran`, or `GIVEN`; None for
            parameters, buffers and constants.
        numbers: Numbers among its arguments.
        result: What it returned first.
        spread: Of a norm: the standard deviation (or RMS) of the middle row of its input; None for others.
        eps: Of a norm.
    """

    name: str
    path: str
    operands: tuple[Size, ...]
    sources: tuple[int | None, ...]
    numbers: tuple[float, ...]
    result: Size
    spread: float | None = None
    eps: float = 0.0

    @property
    def of_signal(self) -> int:
        """Number of operands that come from the call's arguments or other operations: not parameters or constants."""
        return sum(s is not None for s in self.sources)


@dataclass(frozen=True, slots=True)
class Edge:
    """A gradient that a backward function made.

    Attributes:
        ran: The operation, an index of `Followed.ran`.
        node: Name of the backward function.
        given, made: Size of the gradient that it was given and of the one that it made.
        later: The backward function that it belongs to, and the one that takes what it made.
    """

    ran: int
    node: str
    given: Size
    made: Size
    later: tuple[Any, Any]


@dataclass(slots=True)
class Followed:
    """What was seen when a call was run again.

    Attributes:
        ran: Its operations, in order.
        norms: For each module in it that is a norm: the spread of its input, and its eps.
        edges: The gradients that its backward functions made.
        output: The operation that made its first output.
        given: Backward functions that add up the gradients of its arguments.
        why_not: Why it could not be run again; None if it was.
    """

    ran: list[Ran] = field(default_factory=list[Ran])
    norms: dict[str, tuple[float, float]] = field(default_factory=dict[str, "tuple[float, float]"])
    edges: list[Edge] = field(default_factory=list[Edge])
    output: int | None = None
    given: list[Any] = field(default_factory=list[Any])
    why_not: str | None = None


def follow(call: Call, *, backward: bool) -> Followed:
    """Run a call again, and measure its operations.

    Args:
        call: The call, with the gradients of its outputs if `backward`.
        backward: Run its backward pass too.
    """
    seen = Followed()
    if why := obstacle(call):
        seen.why_not = why
        return seen
    given: list[torch.Tensor] = []
    args, kwargs = (leaves(part, given) for part in call.arguments())
    wanted = [*given, *(p for p in call.module.parameters() if p.requires_grad)]
    log = _Log(call, seen, floating((args, kwargs)))
    try:
        with call.as_it_was(), torch.inference_mode(call.inference), torch.set_grad_enabled(backward), log:
            out = nn.Module.__call__(call.module, *args, **kwargs)
            log.assign_custom(out)
        results = floating(out)
        seen.output = log.maker(results[0][1]) if results else None
        if backward:
            pairs = [(t, call.grads[n]) for n, t in results if n in call.grads and t.requires_grad]
            if not pairs or not wanted:
                seen.why_not = "when the block was run again, its outputs had no gradient"
                return seen
            seen.given = [torch.autograd.graph.get_gradient_edge(t).node for t in given]
            log.measure_gradients()
            with call.as_it_was():
                torch.autograd.grad([t for t, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    except FAILURES as error:
        seen.why_not = f"running it again failed: {first_line(error)}"
    finally:
        log.remove()
    return seen


class _Log(TorchFunctionMode):
    """Writes operations to a `Followed` while it is entered."""

    def __init__(self, call: Call, seen: Followed, given: list[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self.seen = seen
        self._names = {id(t): n for n, t in (*call.module.named_parameters(), *call.module.named_buffers())}
        self._kept: list[torch.Tensor] = []
        self._stack = [call.path]
        self._makers = {id(t): (weakref.ref(t), GIVEN) for _, t in given}
        self._nodes: dict[Any, int] = {}
        self._handles: list[hooks.Handle] = []
        for name, module in call.module.named_modules(prefix=call.path):
            path = name.removeprefix(".")
            if module is call.module:
                self._norm(path, module, call.args)
            else:
                self._follow(path, module)

    def _follow(self, path: str, module: nn.Module) -> None:
        def before(_module: nn.Module, args: Any) -> None:
            self.assign_custom(args)
            self._stack.append(path)
            self._norm(path, module, args)

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            self.assign_custom(output)
            self._stack.pop()

        self._handles += [hooks.before(module, before), hooks.after(module, after)]

    def _norm(self, path: str, module: nn.Module, args: Any) -> None:
        if acts_as_norm(module) and (tensors := floating(args)):
            centred = isinstance(module, nn.LayerNorm)
            self.seen.norms[path] = _spread(tensors[0][1], centred=centred), eps_of(module) or 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function and write it down."""
        kwargs = kwargs or {}
        operands = [t for _, t in floating((args, kwargs))] if func.__name__ != "__get__" else []
        before = [size(t, self._names.get(id(t), "")) for t in operands]
        sources = tuple(self.maker(t) for t in operands)
        out = func(*args, **kwargs)
        results = [t for _, t in floating(out)]
        if results:
            name = _plain(func.__name__)
            ran = Ran(name, self._stack[-1], tuple(before), sources, tuple(_numbers((args, kwargs))), size(results[0]))
            if name in FUSED_NORMS and operands:
                ran.spread = _spread(operands[0], centred=name != "rms_norm")
                ran.eps = next((n for n in reversed(ran.numbers) if 0 < n < 1), 0.0)
            self.seen.ran.append(ran)
            of_parameters = bool(operands) and all(s is None for s in sources)
            for result in results:
                if of_parameters:  # a view of a weight, or its cast
                    self._names[id(result)] = before[0].name
                    self._kept.append(result)
                else:
                    self._makers[id(result)] = weakref.ref(result), len(self.seen.ran) - 1
                self._assign(result, len(self.seen.ran) - 1)
        return out

    def maker(self, tensor: torch.Tensor) -> int | None:
        """Return the operation that made a tensor; None if none of this call did."""
        known = self._makers.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def assign_custom(self, values: Any) -> None:
        """Assign what custom autograd Functions left behind these tensors to the module that runs."""
        for _, tensor in floating(values):
            self._assign(tensor, None)

    def _assign(self, tensor: torch.Tensor, ran: int | None) -> None:
        """Assign the backward functions behind a tensor that no operation has yet: to this one, or to a custom one."""
        pending = [tensor.grad_fn]
        while pending:
            node: Any = pending.pop()
            if node is None or node in self._nodes or not node.next_functions:
                continue
            name = str(node.name())
            custom = isinstance(node, torch.autograd.function.BackwardCFunction)
            if ran is None or custom:
                made = size(tensor)
                own = Ran(name.removesuffix("Backward"), self._stack[-1], (made,), (None,), (), made)
                self.seen.ran.append(own)
                self._nodes[node] = len(self.seen.ran) - 1
                self._makers.setdefault(id(tensor), (weakref.ref(tensor), len(self.seen.ran) - 1))
            else:
                self._nodes[node] = ran
            pending.extend(inner for inner, _ in node.next_functions)

    def measure_gradients(self) -> None:
        """Measure the gradients at every backward function."""
        for node, ran in self._nodes.items():
            self._handles.append(node.register_hook(self._hook(node, ran)))

    def _hook(self, node: Any, ran: int) -> Any:
        def seen(made: tuple[torch.Tensor | None, ...], given: tuple[torch.Tensor | None, ...]) -> None:
            first = max((size(g) for g in given if g is not None), key=lambda s: s.rms, default=None)
            if first is None:
                return
            for gradient, (later, _) in zip(made, node.next_functions, strict=True):
                if gradient is not None and later is not None:
                    self.seen.edges.append(Edge(ran, node.name(), first, size(gradient), (node, later)))

        return seen

    def remove(self) -> None:
        """Remove every hook, and release the graph."""
        for handle in self._handles:
            handle.remove()
        self._makers.clear()
        self._kept.clear()


def size(tensor: torch.Tensor, name: str = "") -> Size:
    """Return the size of a tensor, from all of its finite elements."""
    held = local(tensor.detach())
    held = held.abs() if held.is_complex() else held
    wide = held.double().abs() if held.numel() < 2**20 else held.float().abs()
    largest = float(wide.max()) if wide.numel() else 0.0
    if not 0 < largest < float("inf"):
        return Size(0.0, largest, 0.0, held.numel(), name)
    rms = largest * float((wide / largest).square().mean().sqrt())  # its square could overflow
    return Size(rms, largest, float(wide.min()), held.numel(), name)


def _spread(tensor: torch.Tensor, *, centred: bool) -> float:
    """Return the standard deviation, or the RMS, of the middle row of a tensor `[..., features]`; inf if all are 0."""
    rows = local(tensor.detach()).double()
    if rows.dim() == 0 or rows.numel() == 0:
        return 0.0
    rows = rows.flatten(0, -2) if rows.dim() > 1 else rows[None]
    rows = rows[(rows != 0).any(-1)]
    if not len(rows):
        return math.inf
    rows = rows - rows.mean(-1, keepdim=True) if centred else rows
    return float(rows.square().mean(-1).sqrt().median())


def _plain(name: str) -> str:
    """Return a function's name without the marks of operators: `__rdiv__`, `add_`, `div` are `rdiv`, `add`, `div`."""
    return name.strip("_")


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _numbers(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _numbers(part)
