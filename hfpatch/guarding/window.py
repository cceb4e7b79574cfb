"""The figures of a window of micro-batches and the decision made from them, on the device and without a host read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from hfpatch.guarding.history import Usual

FIGURES = 10
"""Number of figures of a window, before the decision: bad losses and micro-batches that are not empty; the same of
those that are empty if every gradient is 0; NaN losses, micro-batches with `tokens=0`, loss, loss without NaN, weights
that are not finite, micro-batches."""
SETTLED, DOUBTFUL = slice(0, 2), slice(2, 4)
"""Parts of these figures."""
LEARNED, RUINED, TOTAL, SKIP = 5, 6, -8, -2
"""Indices in a report."""


class Constants:
    """Constants on a device, made once: copying numbers to a device makes the host wait."""

    def __init__(self) -> None:
        self._made: dict[tuple[type, tuple[float, ...], torch.device], Tensor] = {}

    def __call__(self, values: tuple[float, ...], device: torch.device) -> Tensor:
        """Return numbers of one type as a tensor."""
        key = (type(values[0]), values, device)
        if key not in self._made:
            if len(self._made) > 64:  # parameters that come and go (layer drop) make many
                self._made.clear()
            dtype = torch.float32 if any(isinstance(each, float) for each in values) else None
            self._made[key] = torch.tensor(values, device=device, dtype=dtype)
        return self._made[key]


class Judged(NamedTuple):
    """A decision, on the device.

    Attributes:
        report: The figures of the window, with those of doubtful micro-batches settled; then the norm, the median norm,
            1 if the step exploded, is a spike, is clipped to the median; the loss scale; 1 if it is skipped, and if
            every micro-batch is empty.
        skip: True to skip the step, bool, 0-dim.
        limit: Norm to clip to, 0-dim, because the step stands out; infinite if it does not, None if no step can.
    """

    report: Tensor
    skip: Tensor
    limit: Tensor | None


def figures(
    losses: Sequence[Tensor],
    empties: Sequence[Tensor | None],
    told: Sequence[bool],
    ruined: Tensor | None,
    world: int,
    real: torch.dtype,
    constants: Constants,
    device: torch.device,
) -> Tensor:
    """Return the figures of this rank's window, `[FIGURES]`; ranks add theirs.

    Args:
        losses: Losses of the micro-batches, 0-dim.
        empties: True for a micro-batch without supervised tokens, 0-dim; None where that is not known.
        told: True where the caller said so.
        ruined: True if a weight is not finite, 0-dim; None if the weights were not checked.
        world: Number of ranks.
        real: The dtype to compute in.
        constants: Constants that were made before.
        device: The device to compute on.
    """
    count = len(losses)
    values = torch.stack([x.to(device=device, dtype=real) for x in losses])
    never = constants((False,) * count, device)
    nan = values.isnan()
    doubtful = nan | (values == 0)
    filled = ~doubtful
    said = never
    if any(empty is not None for empty in empties):
        empty = torch.stack([never[0] if known is None else known.to(device) for known in empties])
        doubtful = doubtful & constants(tuple(known is None for known in empties), device)
        filled = ~(empty | doubtful)
        said = empty & constants(tuple(told), device)
    wrong = ~(values.abs() < math.inf)
    flags = torch.stack([wrong & filled, filled, wrong & doubtful, doubtful, nan, said]).sum(1)
    sums = torch.stack([values.sum(), values.nansum()]) / world
    broken = never[:1] if ruined is None else ruined.to(device).reshape(1)
    return torch.cat([flags, sums, broken, constants((count,), device)])


def judged(
    head: Tensor, total: Tensor, scale: Tensor | None, explode_at: float | None, usual: Usual, constants: Constants
) -> Judged:
    """Decide from the figures of a window.

    Args:
        head: The figures, summed over the ranks.
        total: The norm of all gradients, 0-dim.
        scale: The loss scale, 0-dim; None without one.
        explode_at: Norm above which a step is skipped whatever the history; None for no limit.
        usual: The limits of what is usual.
        constants: Constants that were made before.
    """
    settled = head[SETTLED] + head[DOUBTFUL] * (total != 0)
    head = torch.cat([settled, head[DOUBTFUL.stop :]])
    unfilled = settled[1] == 0
    skip = (settled[0] > 0) | ~(total < math.inf) | unfilled | (head[RUINED] > 0)
    median = torch.full_like(total, usual.median)
    exploded = spiked = clipped = constants((False,), total.device)[0]
    limit = None
    if explode_at is not None:
        exploded = total > explode_at
        skip = skip | exploded
    if usual.norm < math.inf:
        apart = total > usual.norm
        spiked = apart & ((head[LEARNED] > usual.loss) | (total > usual.far))
        skip = skip | spiked
        clipped = apart & ~skip
        limit = median.masked_fill(~clipped, math.inf)
    loss_scale = constants((math.nan,), total.device)[0] if scale is None else scale
    flags = torch.stack([total, median, exploded, spiked, clipped, loss_scale, skip, unfilled])
    return Judged(torch.cat([head, flags]), skip, limit)
