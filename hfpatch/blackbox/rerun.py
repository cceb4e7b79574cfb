"""A call made again under a trace; and which call of a window is to blame."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hfpatch.advice import trace
from hfpatch.blackbox.kept import Kept, as_it_was
from hfpatch.compat import hooks
from hfpatch.compat.operators import COLLECTIVES, DispatchMode
from hfpatch.guarding.gradient_norms import tensor_norms
from hfpatch.guarding.outcome import Reason
from hfpatch.model.wrapping import PARALLEL
from hfpatch.tracing.calls import autocast_now
from hfpatch.tracing.drill import FAILURES, first_line, leaves
from hfpatch.tracing.finding import Finding
from hfpatch.tracing.tensors import is_sharded

RUN_AGAIN = (*PARALLEL, "torch.compile")
"""Wrappers that a call is made again without: they talk to other ranks or devices, or compile."""


@dataclass(frozen=True)
class MicroBatch:
    """The calls of the model before one backward pass, and the loss of that pass, on its device."""

    calls: tuple[Kept, ...]
    loss: torch.Tensor


@dataclass(frozen=True)
class Rerun:
    """What a call did when it was made again.

    Attributes:
        finding: The first thing that went wrong; None if nothing did, or it was not looked for.
        loss: The loss in the model's output; None if there is none.
        factor: What it was multiplied by before backward; None if there was no backward pass.
        norm: Norm of the gradients it left, not unscaled; None without a backward pass.
        autocast: dtype by device type, as it was inside the model.
        obstacle: Why it could not be made again, in words; None if it could.
    """

    finding: Finding | None = None
    loss: float | None = None
    factor: float | None = None
    norm: float | None = None
    autocast: dict[str, torch.dtype] | None = None
    obstacle: str | None = None

    @property
    def bad(self) -> bool:
        """Whether something went wrong in it."""
        figures = [f for f in (self.loss, self.norm) if f is not None]
        return self.finding is not None or not all(math.isfinite(f) for f in figures)

    def says(self, step: int, scale: float) -> str:
        """What came of it, in a sentence.

        Args:
            step: The guard's number of it.
            scale: The loss scale, which is taken off the norm.
        """
        if self.finding is not None:
            return self.finding.sentence
        if self.obstacle is not None:
            return f"step {step} was not run again: {self.obstacle}"
        if self.loss is None:
            return (
                f"step {step}, run again: the model's forward pass is healthy, and it returns no loss; the loss and "
                "the backward pass were not run again"
            )
        norm = "" if self.norm is None else f" and a gradient norm of {self.norm / scale:.4g}"
        return f"step {step}, run again: no operation goes wrong; it gives a loss of {self.loss:.4g}{norm}"


def rerun(
    model: nn.Module,
    call: Kept,
    *,
    step: int,
    noted: float | None = None,
    scale: float = 1.0,
    factor: float | None = None,
    traced: bool = True,
) -> Rerun:
    """Make a call again, with its backward pass where the model gives a finite loss; the model stays as it is.

    Args:
        model: Unwrapped (`RUN_AGAIN`).
        call: The call.
        step: Number that the finding carries.
        noted: The loss that backward was called on, a share or a multiple of the model's own.
        scale: The loss scale.
        factor: What to multiply the model's loss by; from `noted` and `scale` if not given.
        traced: Look for the operation.
    """
    if any(is_sharded(p) for p in model.parameters()):
        return Rerun(obstacle="the parameters are sharded over ranks: running it again would wait for the others")
    if call.overwritten:
        return Rerun(obstacle="the batch was overwritten in place since")
    found = trace(model) if traced else None
    loss = used = norm = obstacle = None
    inside: list[dict[str, torch.dtype]] = []
    try:
        with as_it_was(model, call), _alone(), _listening(model, inside), found or nullcontext():
            output = model(*leaves(call.args, []), **leaves(call.kwargs, []))
            own = loss_of(output)
            if own is not None:
                loss = float(own.detach())
                if math.isfinite(loss) and own.requires_grad:
                    used = factor if factor is not None else _factor(loss, noted, scale)
                    (own * used).backward()
                    norm = _norm(model)
    except FAILURES as error:
        obstacle = f"running it again failed: {first_line(error)}"
    first = found.first_bad if found is not None else None
    return Rerun(
        finding=replace(first, step=step) if first is not None else None,
        loss=loss,
        factor=used,
        norm=norm,
        autocast=inside[0] if inside else call.autocast,
        obstacle=obstacle,
    )


def blamed(
    model: nn.Module, window: Sequence[MicroBatch], losses: Sequence[float], reason: Reason | None, scale: float
) -> int:
    """Which micro-batch of a window is to blame: by its loss, else the one that leaves the largest gradients.

    Args:
        model: Unwrapped.
        window: At least one.
        losses: Of its micro-batches.
        reason: Of the skip.
        scale: The loss scale.
    """
    if reason is Reason.NO_LABELS:
        return 0
    if (broken := wrong(losses)) is not None:
        return broken
    if len(window) == 1 or reason not in (Reason.GRADIENTS, Reason.COLLAPSED, Reason.EXPLOSION, Reason.SPIKE):
        return len(window) - 1
    worst, largest = len(window) - 1, -1.0
    for index, (batch, loss) in enumerate(zip(window, losses, strict=True)):
        for call in batch.calls:
            norm = rerun(model, call, step=0, noted=loss, scale=scale, traced=False).norm
            if norm is not None and not math.isfinite(norm):
                return index
            if norm is not None and norm > largest:
                worst, largest = index, norm
    return worst


def wrong(losses: Sequence[float]) -> int | None:
    """The first loss that is not finite; None if all are."""
    return next((index for index, loss in enumerate(losses) if not math.isfinite(loss)), None)


def loss_of(output: Any) -> torch.Tensor | None:
    """The loss in what a model returned: its `loss`, the first of a tuple, or the output itself, if one number."""
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, tuple):
        found = output[0] if output else None
    else:
        found = getattr(output, "loss", output)
    if isinstance(found, torch.Tensor) and found.numel() == 1 and found.is_floating_point():
        return found.reshape(())
    return None


def _factor(loss: float, noted: float | None, scale: float) -> float:
    if noted is None or not math.isfinite(noted) or loss == 0:
        return scale
    return noted / loss * scale


def _norm(model: nn.Module) -> float:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return float(torch.linalg.vector_norm(tensor_norms(grads))) if grads else 0.0


@contextmanager
def _listening(model: nn.Module, inside: list[dict[str, torch.dtype]]) -> Generator[None]:
    """Note the autocast in the first module that the model calls: accelerate sets one in the model's own forward."""

    def before(*_: Any) -> None:
        if not inside:
            inside.append(autocast_now())

    handles = [hooks.before(module, before) for module in model.modules() if module is not model]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Alone(DispatchMode):
    """Refuses to talk to other ranks: they may not be running the same thing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVES:
            raise RuntimeError(f"a layer of it talks to other ranks ({func})")
        return func(*args, **(kwargs or {}))


@contextmanager
def _alone() -> Generator[None]:
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        yield
        return
    with _Alone():
        yield
