"""Replays one kept call while its operations are watched: forward only, or with its backward pass.

The model does not change: no gradients are accumulated, and buffers and random state are put back.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from hfpatch.tracing.calls import Call
from hfpatch.tracing.naming.attempt import FAILURES, first_line
from hfpatch.tracing.naming.operations import Operations
from hfpatch.tracing.naming.origin import Origin
from hfpatch.tracing.naming.owners import Owners, Target
from hfpatch.tracing.tensors import DEPTH, floating, is_sharded


@dataclass(frozen=True)
class Replayed:
    """The result of a replay.

    Attributes:
        origin: The first operation whose bad values reached the target tensor, or a gradient; None if there was none.
        met: After a backward replay, the operation of the backward pass that first had those values in its result, or
            made them.
        swallowed: The first origin whose bad values did not reach the target; None if there was none.
        tensor: The target tensor; None after a backward replay.
        changed: Names of buffers, attributes and arguments that the replay changed, and that were put back.
        obstacle: Why the call could not be replayed; None if it was.
    """

    origin: Origin | None = None
    met: Origin | None = None
    swallowed: Origin | None = None
    tensor: torch.Tensor | None = None
    changed: tuple[str, ...] = ()
    obstacle: str | None = None


def obstacle(call: Call) -> str | None:
    """Return why a call cannot be replayed; None if it can."""
    if any(is_sharded(p) for p in call.module.parameters()):
        return "its parameters are sharded over ranks: running it again would wait for the others"
    if (name := call.used_up) is not None:
        return f"its argument {name!r} is an iterator, which the first run used up"
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
    with Owners(call, skip, target) as owners:
        operations = Operations(call.module, owners, active=owners.active)
        try:
            with (
                call.as_it_was(args, kwargs) as changed,
                torch.inference_mode(call.inference),
                torch.no_grad(),
                operations,
            ):
                out = nn.Module.__call__(call.module, *args, **kwargs)
        except FAILURES as error:
            return Replayed(obstacle=f"running it again failed: {first_line(error)}")
    if target.module == call.path:
        owners.capture(out)
    if owners.tensor is None:
        return Replayed(obstacle="when the block was run again, this tensor did not occur", changed=tuple(changed))
    reached = operations.marks(owners.tensor)
    origins = operations.origins
    return Replayed(
        origin=origins[min(reached)] if reached else None,
        swallowed=next((o for n, o in enumerate(origins) if n not in reached), None),
        tensor=owners.tensor,
        changed=tuple(changed),
    )


def backward(call: Call, factor: float = 1.0) -> Replayed:
    """Replay a call and its backward pass, starting from those gradients of its outputs that are finite.

    Args:
        call: The call.
        factor: Factor on those gradients; `1 / scale` replays the pass without a loss scale.
    """
    if why := obstacle(call):
        return Replayed(obstacle=why)
    grads = {name: grad * factor for name, grad in call.grads.items() if bool(grad.isfinite().all())}
    if not grads:
        return Replayed(obstacle="no gradient of its outputs was recorded")
    try:
        return _backward(call, grads, reentrant=False)
    except _Reentrant:
        pass
    except FAILURES as error:
        return Replayed(obstacle=f"running it again failed: {first_line(error)}")
    try:
        return _backward(call, grads, reentrant=True)
    except FAILURES as error:
        return Replayed(obstacle=f"running it again failed: {first_line(error)}")


class _Reentrant(Exception):  # noqa: N818
    """Ends a replay: the graph holds a reentrant checkpoint, for which torch allows only `backward()`."""


def _backward(call: Call, grads: dict[str, torch.Tensor], *, reentrant: bool) -> Replayed:
    """Run a call and its backward pass; with `reentrant` by `backward()`, on leaves that stand for the parameters.

    Raises:
        _Reentrant: The graph holds a reentrant checkpoint, and `reentrant` is False.
    """
    given: list[torch.Tensor] = []
    args, kwargs = (leaves(part, given) for part in call.arguments())
    parameters: dict[str, torch.Tensor] = {n: p for n, p in call.module.named_parameters() if p.requires_grad}
    if reentrant:
        parameters = {name: p.detach().requires_grad_() for name, p in parameters.items()}
    with Owners(call, set(), None) as owners:
        operations = Operations(call.module, owners, hidden_by=owners.selecting)
        with (
            call.as_it_was(args, kwargs) as changed,
            torch.enable_grad(),
            torch.autograd.set_multithreading_enabled(False),
            operations,
        ):
            if reentrant:
                operations.name(parameters)
                out = dict(floating(torch.func.functional_call(call.module, parameters, args, kwargs)))
            else:
                out = dict(floating(nn.Module.__call__(call.module, *args, **kwargs)))
            pairs = [(out[n], grad) for n, grad in grads.items() if n in out and out[n].requires_grad]
            wanted = [*given, *parameters.values()]
            if not pairs or not wanted:
                return Replayed(obstacle="when the block was run again, its outputs had no autograd graph")
            outputs, starts = [o for o, _ in pairs], [g for _, g in pairs]
            if owners.begin_backward(outputs) and not reentrant:
                raise _Reentrant
            if reentrant:
                torch.autograd.backward(outputs, starts)
                made: Any = [leaf.grad for leaf in wanted]
            else:
                made = torch.autograd.grad(outputs, wanted, starts, allow_unused=True)
    reached = operations.marks(list(made))
    first = next((n for n in operations.met if n in reached), None)
    if first is None:
        return Replayed(changed=tuple(changed))
    return Replayed(origin=operations.origins[first], met=operations.met[first], changed=tuple(changed))


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
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(leaves(part, found, depth - 1) for part in value))
    if type(value) is dict or isinstance(value, ModelOutput):
        inner = {key: leaves(part, found, depth - 1) for key, part in value.items()}
        return inner if type(value) is dict else type(value)(**inner)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: leaves(getattr(value, f.name), found, depth - 1) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **parts)
    return value
