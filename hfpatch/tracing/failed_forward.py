"""A forward that raises: the module, the function of torch, the dtypes or shapes, and what to cast or check."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.compat import frames
from hfpatch.dtypes import dtype_name
from hfpatch.tracing.calls import Call
from hfpatch.tracing.events import Step
from hfpatch.tracing.finding import Finding
from hfpatch.tracing.naming.attempt import Failure, attempt, first_line, listed
from hfpatch.tracing.watched import Places


@dataclass(frozen=True)
class Raised:
    """An exception of a forward, as data: it is not kept, because its frames hold the tensors of the step.

    Attributes:
        module: Path of the innermost module whose forward it went through.
        error: Its type and the first line of its message.
        line: The innermost line outside of torch: file, number and code.
        again: True if the call may be run again; False if memory ran out or the device failed.
    """

    module: str
    error: str
    line: str
    again: bool


def of_model(model: nn.Module) -> Raised | None:
    """Return the exception that ends a model's forward; None if none does. To be called from its forward hooks."""
    error = sys.exception()
    inside = frames.raised_in(error, model) if error is not None else []
    if error is None or not inside:
        return None
    paths = {module: path for path, module in model.named_modules()}
    return of(error, next((paths[m] for m in reversed(inside) if m in paths), ""))


def of(error: BaseException, path: str) -> Raised:
    """Return an exception that went through the forward at a path."""
    again = not isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError))
    return Raised(path, f"{type(error).__name__}: {first_line(error)}", frames.line_of(error), again)


def finding(
    raised: Raised,
    step: Step,
    calls: Mapping[tuple[str, int], Call],
    places: Places,
    modules: Mapping[str, nn.Module],
) -> Finding:
    """Return the finding for a forward that raised.

    Args:
        raised: The exception.
        step: The step in which it was raised.
        calls: The kept calls of the step, by path and number; the model must not have changed since.
        places: The model's modules.
        modules: The same by path, with those that were watched beside the model.
    """
    own = [call for (path, _), call in calls.items() if path == raised.module]
    around = [call for (path, _), call in calls.items() if path == places.enclosing(raised.module)]
    kept = own or around
    failure = attempt(kept[-1], raised.module) if kept and raised.again else None
    at = f" at {raised.line}" if raised.line else ""
    why = f"it raises {raised.error}{at}"
    operation, operand, symptom, dtypes = "forward", "", "raised", ""
    if failure is not None:
        operation, symptom = failure.name, failure.symptom
        operand = ", ".join(map(str, failure.operands))
        dtypes = " and ".join(dict.fromkeys(dtype_name(o.tensor.dtype) for o in failure.operands))
        why = f"{_why(failure, raised, step, calls, modules)}; {why}"
    return Finding(
        phase="forward",
        epoch=step.epoch,
        step=step.number,
        module=raised.module,
        kind=type(modules[raised.module]).__name__ if raised.module in modules else "",
        tensor=f"no output of {raised.module or 'the model'}: forward raised",
        operation=operation,
        operand=operand,
        holds=raised.error,
        symptom=symptom,
        why=why,
        dtype=dtypes,
        raised=True,
    )


def _why(
    failure: Failure,
    raised: Raised,
    step: Step,
    calls: Mapping[tuple[str, int], Call],
    modules: Mapping[str, nn.Module],
) -> str:
    given = listed([str(o) for o in failure.operands])
    if failure.symptom == "mixed-dtypes":
        if failure.why:
            return f"it is given {given}, and {failure.why}"
        return f"it is given {given}, and runs if they have one dtype; {_cast(failure, raised, step, modules)}"
    if failure.symptom == "shape-mismatch":
        return (
            f"the shapes of {given} do not fit" if len(failure.operands) > 1 else f"the shape of {given} does not fit"
        )
    if failure.symptom == "index-out-of-range" and failure.index is not None:
        name = _key(failure.index, calls.get(("", 0)))
        return failure.why + (f"; check {name!r} of the batch" if name else "; check the ids or labels, and the config")
    if failure.symptom == "device-mismatch":
        return f"{failure.why}: {given}; move the model and the batch to one device"
    return f"it is given {given}"


def _cast(failure: Failure, raised: Raised, step: Step, modules: Mapping[str, nn.Module]) -> str:
    """Return what to cast: the argument of the outermost module that has other weights, or else the operand."""
    weights = {o.tensor.dtype for o in failure.operands if o.name and o.tensor.is_floating_point()}
    if not weights and raised.module in modules:
        weights = {p.dtype for p in modules[raised.module].parameters() if p.is_floating_point()}
    inputs = [o.tensor.dtype for o in failure.operands if not o.name and o.tensor.is_floating_point()]
    odd = next((d for d in inputs if d not in weights), None)
    if len(weights) != 1 or odd is None:
        return "cast them to one"
    wanted = dtype_name(next(iter(weights)))
    parts = raised.module.split(".") if raised.module else []
    for path in [".".join(parts[:depth]) for depth in range(len(parts) + 1)]:
        held = {p.dtype for p in modules[path].parameters() if p.is_floating_point()} if path in modules else set()
        if not held or odd in held:
            continue
        for event in step.of("forward"):
            if (event.module, event.role, event.dtype) == (path, "input", odd):
                name = f" as {event.name!r}" if event.name else ""
                what = f"{dtype_name(odd)} enters {path or 'the model'}{name}"
                return f"{what}: cast it to {wanted}, or load {path or 'the model'} in {dtype_name(odd)}"
        return f"cast what {path or 'the model'} is given to {wanted}, or load it in {dtype_name(odd)}"
    return f"cast its input to {wanted}"


def _key(index: torch.Tensor, root: Call | None) -> str:
    """Return the key of the batch that holds these indices; "" if none does."""
    given: dict[str, Any] = {} if root is None else {**{str(i): a for i, a in enumerate(root.args)}, **root.kwargs}
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and value.shape == index.shape and torch.equal(value, index.to(value.dtype)):
            return name
    return ""
