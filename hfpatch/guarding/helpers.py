"""Checks for a training loop of one's own: the loss, and the gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hfpatch.errors import InputError
from hfpatch.given import NUMBER, REAL, TENSOR, shown, want
from hfpatch.guarding.checks import plain
from hfpatch.guarding.gradient_norms import piece, tensor_norms
from hfpatch.model.walk import root_module
from hfpatch.report import Sheet

if TYPE_CHECKING:
    from torch import Tensor, nn

LARGEST = 5
"""Parameters that a report names."""


def validate_loss(loss: Tensor, min: float = -1e6, max: float = 1e6) -> Tensor:  # noqa: A002 - read as they are written
    """Raise unless a loss is a finite number in a range; never replaces or changes it.

        validate_loss(model(**batch).loss).backward()

    Reads the loss on the host, which waits for the device. Over several ranks, one that raises leaves the others
    waiting in their next collective call: use `hfpatch.Guard` there, which decides on all of them alike.

    Args:
        loss: One number, 0-dim or of one element.
        min: Smallest value that is right.
        max: Largest value that is right.

    Returns:
        The loss itself.

    Raises:
        InputError: It is NaN, infinite or out of range, or not one number; or `min` is not below `max`.
    """
    want("validate_loss", loss=(loss, TENSOR), min=(min, REAL), max=(max, REAL))
    if not min < max:
        raise InputError(f"validate_loss: want min below max, got min={min:g} and max={max:g}")
    if loss.numel() != 1 or loss.is_complex():
        raise InputError(
            f"validate_loss: want a loss of one real number, got {loss.dtype} of shape {tuple(loss.shape)}; reduce it "
            "first"
        )
    value = float(loss.detach())
    if math.isnan(value):
        raise InputError(
            "validate_loss: the loss is NaN; if every label of the batch is -100, look at the collator; else "
            "hfpatch.trace(model) around this batch names the operation, and hfpatch.Guard skips such batches"
        )
    if math.isinf(value):
        raise InputError(
            f"validate_loss: the loss is {value:+}; hfpatch.trace(model) around this batch names the operation that "
            "overflowed, and hfpatch.Guard skips such batches"
        )
    if not min <= value <= max:
        raise InputError(
            f"validate_loss: the loss is {value:.6g}, outside {min:g} to {max:g}; look at the batch and the learning "
            "rate, or widen the range if such losses are normal here"
        )
    return loss


@dataclass(frozen=True)
class GradientReport:
    """Gradients of a model at one moment; prints itself as a table.

    Attributes:
        norm: L2 norm over all of them, summed in float32; NaN or Inf if one is not finite.
        largest: Names and norms of the largest, largest first; what is not finite before all others.
        nonfinite: Share of the values that are NaN or Inf, 0 to 1.
        parameters: Parameters with a gradient.
        missing: Names of parameters that train and have none.
    """

    norm: float
    largest: tuple[tuple[str, float], ...]
    nonfinite: float
    parameters: int
    missing: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON: norm, largest, nonfinite, parameters, missing."""
        return {**vars(self), "largest": [list(pair) for pair in self.largest], "missing": list(self.missing)}

    def __str__(self) -> str:
        title = f"norm {self.norm:.4g} over {self.parameters} gradients, {self.nonfinite:.2%} of the values not finite"
        rows = tuple((name, f"{norm:.4g}") for name, norm in self.largest)
        few = ", ".join(self.missing[:LARGEST]) + (", ..." if len(self.missing) > LARGEST else "")
        notes = (f"{len(self.missing)} trained parameters have no gradient: {few}",) if self.missing else ()
        return Sheet(title, ("largest gradients", "norm"), rows, notes, wide=("largest gradients",)).to_text()


def gradient_report(model: nn.Module, loss_scale: float = 1.0) -> GradientReport:
    """What the gradients are after a backward pass. Changes nothing; waits for the device.

    Sharded gradients (`fully_shard`) are summed over all ranks, so every rank must call it there.

    Args:
        model: Whose parameters have gradients; wrapped or not.
        loss_scale: `scaler.get_scale()` before `scaler.unscale_`, by which gradients are too large there.

    Raises:
        InputError: No parameter has a gradient, or `loss_scale` is no number above 0.
    """
    if not NUMBER.fits(loss_scale) or not 0 < loss_scale < math.inf:
        raise InputError(
            f"gradient_report: want a loss_scale above 0, got {shown(loss_scale)}; leave it out after unscale_"
        )
    named = [(plain(n), p) for n, p in root_module(model).named_parameters()]
    grads = {n: p.grad for n, p in named if p.grad is not None}
    if not grads:
        raise InputError(
            f"gradient_report: none of {len(named)} parameters of {type(model).__name__} has a gradient; call it after "
            "backward() and before zero_grad()"
        )
    squares, bad, count = _measured(list(grads.values()))
    norms = [math.sqrt(s) / loss_scale for s in squares]
    ranked = sorted(zip(grads, norms, strict=True), key=lambda x: (not math.isnan(x[1]), -x[1]))
    return GradientReport(
        norm=math.sqrt(math.fsum(squares)) / loss_scale if all(map(math.isfinite, squares)) else sum(norms),
        largest=tuple(ranked[:LARGEST]),
        nonfinite=bad / count,
        parameters=len(grads),
        missing=tuple(n for n, p in named if p.requires_grad and p.grad is None),
    )


def _measured(grads: list[Tensor]) -> tuple[list[float], float, float]:
    """Sum of squares of each gradient, values that are not finite, and values, over all ranks where one is sharded."""
    dist = torch.distributed
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    pieces = [piece(g, world) for g in grads]
    sharded = any(cut for _, _, cut in pieces)
    device = pieces[0][0].device
    real = torch.float32 if device.type == "mps" else torch.float64
    # a plain gradient is the same on every rank, and counts once where nothing is summed
    shares = torch.tensor([share if sharded else 1.0 for _, share, _ in pieces], dtype=real, device=device)
    local = [part for part, _, _ in pieces]
    bad = torch.stack([(~g.isfinite()).sum().to(device=device, dtype=real) for g in local])
    sizes = torch.tensor([float(g.numel()) for g in local], dtype=real, device=device)
    squares = tensor_norms(local).to(real).square() * shares
    found = torch.cat([squares, (bad * shares).sum().reshape(1), (sizes * shares).sum().reshape(1)])
    if sharded:
        dist.all_reduce(found)
    *each, broken, count = found.tolist()
    return each, broken, count
