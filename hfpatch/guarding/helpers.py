"""Checks of the loss and the gradients, for your own training loop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hfpatch.deprecated import renamed
from hfpatch.errors import InputError
from hfpatch.given import NUMBER, REAL, TENSOR, shown, want
from hfpatch.guarding.checks import clean_name
from hfpatch.guarding.gradient_norms import local_part, wide_norms
from hfpatch.model.walk import root_module
from hfpatch.report import Sheet, Shown, finite

if TYPE_CHECKING:
    from torch import Tensor, nn

LARGEST = 5
"""Parameters that a report names."""


@renamed("validate_loss", "the old names are those of Python's own functions", min="low", max="high")
def validate_loss(loss: Tensor, low: float = -1e6, high: float = 1e6) -> Tensor:
    """Raise unless a loss is a finite number in a range; return it unchanged.

        validate_loss(model(**batch).loss).backward()

    The host reads the loss, which waits for the device. Over several ranks, a rank that raises leaves the others
    waiting in their next collective call: use `hfpatch.Guard` there, which decides the same on all ranks.

    Args:
        loss: One number, 0-dim or with one element.
        low: Smallest allowed value.
        high: Largest allowed value.

    Returns:
        The loss itself.

    Raises:
        InputError: It is NaN, infinite or out of range, or not one number; or `low` is not below `high`.
    """
    want("validate_loss", loss=(loss, TENSOR), low=(low, REAL), high=(high, REAL))
    low, high = float(low), float(high)
    if not low < high:
        raise InputError(f"validate_loss: want low below high, got low={low:g} and high={high:g}")
    if loss.numel() != 1 or loss.is_complex():
        raise InputError(
            f"validate_loss: want a loss of one real number, got {loss.dtype} of shape {tuple(loss.shape)}; reduce it "
            "first"
        )
    value = float(loss.detach())
    if math.isnan(value):
        raise InputError(
            "validate_loss: the loss is NaN; if every label of the batch is -100, check the collator; else "
            "hfpatch.trace(model) around this batch names the operation, and hfpatch.Guard skips such batches"
        )
    if math.isinf(value):
        raise InputError(
            f"validate_loss: the loss is {value:+}; hfpatch.trace(model) around this batch names the operation that "
            "overflowed, and hfpatch.Guard skips such batches"
        )
    if not low <= value <= high:
        raise InputError(
            f"validate_loss: the loss is {value:.6g}, outside {low:g} to {high:g}; check the batch and the learning "
            "rate, or widen the range if such losses are normal here"
        )
    return loss


@dataclass(frozen=True, repr=False)
class GradientReport(Shown):
    """Figures of a model's gradients; prints itself as a table.

    Attributes:
        norm: L2 norm of all gradients, summed in at least float32; NaN or Inf if one of their norms is.
        largest: Names and norms of the five gradients with the largest norms, largest first; NaN comes before Inf, Inf
            before finite norms.
        nonfinite: Share of the gradient values that are NaN or Inf, 0 to 1.
        parameters: Number of parameters with a gradient.
        missing: Names of parameters that require a gradient and have none.
    """

    norm: float
    largest: tuple[tuple[str, float], ...]
    nonfinite: float
    parameters: int
    missing: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: norm, largest, nonfinite, parameters, missing; a non-finite norm is null."""
        return {
            **vars(self),
            "norm": finite(self.norm),
            "largest": [[name, finite(norm)] for name, norm in self.largest],
            "missing": list(self.missing),
        }

    def sheet(self) -> Sheet:
        """Return it as a table."""
        title = f"norm {self.norm:.4g} over {self.parameters} gradients, {self.nonfinite:.2%} of the values not finite"
        rows = tuple((name, f"{norm:.4g}") for name, norm in self.largest)
        few = ", ".join(self.missing[:LARGEST]) + (", ..." if len(self.missing) > LARGEST else "")
        notes = (f"{len(self.missing)} trained parameters have no gradient: {few}",) if self.missing else ()
        return Sheet(title, ("largest gradients", "norm"), rows, notes, wide=("largest gradients",))


def gradient_report(model: nn.Module, loss_scale: float = 1.0) -> GradientReport:
    """Return norms and shares of bad values of the gradients after a backward pass. Changes nothing.

    The host waits for the device. Sharded gradients (`fully_shard`) are summed over all ranks, so every rank must call
    it.

    Args:
        model: The model whose parameters have gradients; wrapped or not.
        loss_scale: Factor by which the norms are divided: `scaler.get_scale()` before `scaler.unscale_`.

    Raises:
        InputError: No parameter has a gradient, or `loss_scale` is not a positive number.
    """
    if not NUMBER.fits(loss_scale) or not 0 < loss_scale < math.inf:
        raise InputError(
            f"gradient_report: want a loss_scale above 0, got {shown(loss_scale)}; leave it out after unscale_"
        )
    named = [(clean_name(n), p) for n, p in root_module(model).named_parameters()]
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
    """Return each gradient's sum of squares, and the numbers of non-finite values and of values.

    They are summed over all ranks if a gradient is sharded.
    """
    dist = torch.distributed
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    pieces = [local_part(g, world) for g in grads]
    sharded = any(cut for _, _, cut in pieces)
    device = pieces[0][0].device
    real = torch.float32 if device.type == "mps" else torch.float64
    # a plain gradient is the same on every rank; without a sum over ranks it counts once
    shares = torch.tensor([share if sharded else 1.0 for _, share, _ in pieces], dtype=real, device=device)
    local = [part for part, _, _ in pieces]
    bad = torch.stack([(~g.isfinite()).sum().to(device=device, dtype=real) for g in local])
    sizes = torch.tensor([float(g.numel()) for g in local], dtype=real, device=device)
    squares = wide_norms(local).to(real).square() * shares
    found = torch.cat([squares, (bad * shares).sum().reshape(1), (sizes * shares).sum().reshape(1)])
    if sharded:
        dist.all_reduce(found)
    *each, broken, count = found.tolist()
    return each, broken, count
