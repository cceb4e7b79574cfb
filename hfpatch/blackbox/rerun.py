"""Runs a kept call again under a trace, and finds the micro-batch at fault in a window."""

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
from hfpatch.compat.operators import alone
from hfpatch.dtypes import dtype_name
from hfpatch.guarding.gradient_norms import tensor_norms
from hfpatch.guarding.outcome import Reason
from hfpatch.report import Sheet, Shown, finite
from hfpatch.tracing.calls import autocast_now
from hfpatch.tracing.finding import Finding
from hfpatch.tracing.naming.attempt import FAILURES, first_line
from hfpatch.tracing.rerun_block import leaves
from hfpatch.tracing.tensors import is_sharded


@dataclass(frozen=True)
class MicroBatch:
    """The calls of the model before one backward pass, and the loss of that pass, 0-dim, on its device."""

    calls: tuple[Kept, ...]
    loss: torch.Tensor


@dataclass(frozen=True, repr=False)
class Rerun(Shown):
    """The result of running a call again.

    Attributes:
        finding: The first fault; None if there was none, or the run was not traced.
        loss: The loss in the model's output; None if there is none.
        factor: Factor on the loss before backward; None without a backward pass.
        norm: Norm of the gradients, not unscaled; None without a backward pass.
        autocast: Autocast dtype by device type, inside the model.
        obstacle: Why the call could not be run again; None if it could.
        advice: What to do about the finding, a sentence each; patches were tried on the call where it says so.
    """

    finding: Finding | None = None
    loss: float | None = None
    factor: float | None = None
    norm: float | None = None
    autocast: dict[str, torch.dtype] | None = None
    obstacle: str | None = None
    advice: tuple[str, ...] = ()

    @property
    def bad(self) -> bool:
        """True if there is a finding, or loss or norm are not finite."""
        figures = [f for f in (self.loss, self.norm) if f is not None]
        return self.finding is not None or not all(math.isfinite(f) for f in figures)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON: bad, finding, loss, factor, norm (null where not finite), autocast, obstacle."""
        return {
            "bad": self.bad,
            "finding": self.finding.to_dict() if self.finding is not None else None,
            "loss": finite(self.loss),
            "factor": finite(self.factor),
            "norm": finite(self.norm),
            "autocast": {device: dtype_name(dtype) for device, dtype in (self.autocast or {}).items()},
            "obstacle": self.obstacle,
        }

    def sheet(self) -> Sheet:
        """Return what was found, and the figures."""
        title = self.finding.sentence if self.finding is not None else self.obstacle or "no operation goes wrong"
        figures = (("loss", self.loss), ("gradient norm, not unscaled", self.norm))
        return Sheet(title, ("", " "), tuple((name, f"{value:.4g}") for name, value in figures if value is not None))

    def says(self, step: int, scale: float) -> str:
        """Return the result in a sentence.

        Args:
            step: The guard's number of the step.
            scale: The loss scale, by which the norm is divided.
        """
        if self.finding is not None:
            return self.finding.sentence
        if self.obstacle is not None:
            return f"step {step} was not run again: {self.obstacle}"
        if self.loss is None:
            return (
                f"step {step}, run again: no operation of the model's forward pass goes wrong, and it returns no loss, "
                "so the loss and the backward pass were not run again"
            )
        norm = "" if self.norm is None else f" and the gradient norm {self.norm / scale:.4g}"
        return f"step {step}, run again: no operation goes wrong; the loss is {self.loss:.4g}{norm}"


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
    """Run a call again, with its backward pass if the model returns a finite loss; the model is not changed.

    Args:
        model: The model, unwrapped (`RUN_AGAIN`).
        call: The call.
        step: Number of the step in the finding.
        noted: The loss that backward was called on: the model's loss, or a share or multiple of it.
        scale: The loss scale.
        factor: Factor on the model's loss; None to compute it from `noted` and `scale`.
        traced: Trace the run, to find the operation.
    """
    if any(is_sharded(p) for p in model.parameters()):
        return Rerun(obstacle="the parameters are sharded over ranks: running it again would wait for the others")
    if call.overwritten:
        return Rerun(obstacle="the batch was overwritten in place")
    found = trace(model) if traced else None
    loss = used = norm = obstacle = None
    inside: list[dict[str, torch.dtype]] = []
    try:
        with as_it_was(model, call), alone(), _listening(model, inside), found or nullcontext():
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
        advice=found.advice if found is not None else (),
    )


def blamed(
    model: nn.Module, window: Sequence[MicroBatch], losses: Sequence[float], reason: Reason | None, scale: float
) -> int:
    """Return the index of the micro-batch at fault: the first with a bad loss, else the one with the largest gradients.

    Without labels it is the first; for reasons that gradients do not tell, the last.

    Args:
        model: The model, unwrapped.
        window: The micro-batches, at least one.
        losses: Their losses.
        reason: Reason of the skip; None if the step was not skipped.
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
    """Return the index of the first loss that is not finite; None if all are finite."""
    return next((index for index, loss in enumerate(losses) if not math.isfinite(loss)), None)


def loss_of(output: Any) -> torch.Tensor | None:
    """Return the loss in a model's output, 0-dim: its `loss`, the first of a tuple, or the output itself.

    Returns:
        None if that is not a floating-point tensor of one number.
    """
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
    """Record autocast in the first module that the model calls: accelerate turns it on inside the model's forward."""

    def before(*_: Any) -> None:
        if not inside:
            inside.append(autocast_now())

    handles = [hooks.before(module, before) for module in model.modules() if module is not model]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
