"""Norms and losses of the last good steps, on the gradients' device, and the rule that finds a spike among them.

Healthy runs have heavy tails: single batches reach 10 to 144 times the running median norm (batches of 4 x 64 tokens,
SmolLM2 135M, full fine-tuning and a fresh projector, 8 runs of 1,000 steps), with a loss as usual. A bad batch moves
both. So a norm above `spike_at` times the median is a spike if the loss is out of its own range too; if the loss is as
usual, the step is taken with its gradients clipped to the median norm, unless the norm is beyond any seen in a healthy
run.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

WINDOW = 64
"""Good steps that are remembered."""
WARMUP = 16
"""Good steps before a norm can be called a spike."""
FAR = 1000.0
"""Multiple of the median norm that is a spike whatever the loss is; 144 is the largest seen in a healthy run."""
ODD = 6.0
"""Robust standard deviations above the median at which a loss is unusual; 4.2 is the largest seen in a healthy run."""
FLOOR = 0.02
"""Smallest standard deviation of a loss, as a share of its median."""
MAD = 1.4826
"""Standard deviations in a median absolute deviation, of a normal distribution."""

OnSpike = Literal["skip", "clip"]


class Finding(NamedTuple):
    """The place of a step among the last good ones, on the device.

    Attributes:
        median: Median norm, 0-dim; NaN before there are enough good steps.
        skip: True if the step is a spike and to be skipped, 0-dim.
        clip: True if its gradients are to be clipped to the median norm, 0-dim.
    """

    median: Tensor
    skip: Tensor
    clip: Tensor


class History:
    """Norms and losses of the last good steps.

    Args:
        spike_at: Multiple of the median norm above which a step stands out; None for no limit.
        on_spike: `skip`: skip it if its loss is unusual too, else clip it to the median. `clip`: clip it in any case.
    """

    def __init__(self, spike_at: float | None, on_spike: OnSpike) -> None:
        self.spike_at = spike_at
        self.on_spike = on_spike
        self._saved: tuple[int, list[list[float]]] = (0, [[math.nan] * WINDOW] * 2)
        self._kept: Tensor | None = None
        self._good: Tensor | None = None

    def place(self, norm: Tensor, loss: Tensor) -> Finding:
        """Return the place of a step with this norm and this loss, both 0-dim."""
        kept, good = self._on(norm)
        count = good.clamp(max=WINDOW)
        norms, losses = kept
        median = _median(norms, count)
        known = count >= WARMUP
        never = torch.zeros_like(known)
        shown = median.masked_fill(~known, math.nan)
        if self.spike_at is None:
            return Finding(shown, never, never)
        apart = known & (median > 0) & norm.isfinite()
        large = apart & (norm > self.spike_at * median)
        if self.on_spike == "clip":
            return Finding(shown, never, large)
        usual = _median(losses, count)
        spread = torch.maximum(MAD * _median((losses - usual).abs(), count), FLOOR * usual.abs())
        skip = large & ((loss > usual + ODD * spread) | (norm > FAR * median))
        return Finding(shown, skip, large & ~skip)

    def add(self, norm: Tensor, loss: Tensor, good: Tensor) -> None:
        """Remember a step if `good`, bool, 0-dim, is true."""
        kept, count = self._on(norm)
        here = (torch.arange(WINDOW, device=kept.device) == count % WINDOW) & good
        self._kept = torch.where(here, torch.stack([norm, loss.to(norm)]).unsqueeze(1), kept)
        self._good = count + good.to(count)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values, which JSON can hold."""
        good, kept = self._saved
        if self._kept is not None and self._good is not None:
            good, kept = int(self._good), self._kept.tolist()
        norms, losses = ([None if math.isnan(x) else x for x in row] for row in kept)
        return {"good_steps": good, "norms": norms, "losses": losses}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned, of this release or of one that remembered no losses."""
        rows = [saved["norms"], saved.get("losses", [None] * WINDOW)]
        self._saved = (saved["good_steps"], [[math.nan if x is None else x for x in row] for row in rows])
        if "losses" not in saved:
            self._saved = (0, [[math.nan] * WINDOW] * 2)  # a loss cannot be judged, so the warm-up begins again
        self._kept = self._good = None

    def _on(self, like: Tensor) -> tuple[Tensor, Tensor]:
        if self._kept is None or self._good is None:
            good, kept = self._saved
            self._kept = torch.tensor(kept, dtype=like.dtype, device=like.device)
            self._good = torch.tensor(good, device=like.device)
        return self._kept, self._good


def _median(values: Tensor, count: Tensor) -> Tensor:
    """Return the lower median of the first `count` values in order; NaN are the last."""
    return values.sort().values.gather(0, ((count - 1) // 2).clamp(min=0).reshape(1))[0]
