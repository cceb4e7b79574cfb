"""Norms and losses of the last good steps, on the host, and the rule that finds a spike among them.

Healthy runs have heavy tails: single batches reach 10 to 144 times the running median norm (batches of 4 x 64 tokens,
SmolLM2 135M, full fine-tuning and a fresh projector, 8 runs of 1,000 steps), with a loss as usual. A bad batch moves
both. So a norm above `spike_at` times the median is a spike if the loss is out of its own range too; if the loss is as
usual, the step is taken with its gradients clipped to the median norm, unless the norm is beyond any seen in a healthy
run.

The figures of a step are on the host before the next step is judged, also where its decision stayed on the device: so
the limits are plain numbers, and comparing with them is all that a device has to do.
"""

from __future__ import annotations

import math
from statistics import median_low
from typing import Any, Literal, NamedTuple

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


class Usual(NamedTuple):
    """The limits of what is usual after the last good steps.

    Attributes:
        median: Median norm; NaN before there are enough good steps.
        norm: Norm above which a step stands out; infinite if none does.
        loss: Loss above which a step that stands out is a spike.
        far: Norm above which it is a spike whatever its loss is.
    """

    median: float
    norm: float = math.inf
    loss: float = math.inf
    far: float = math.inf


class History:
    """Norms and losses of the last good steps.

    Args:
        spike_at: Multiple of the median norm above which a step stands out; None for no limit.
        on_spike: `skip`: skip it if its loss is unusual too, else clip it to the median. `clip`: clip it in any case.
    """

    def __init__(self, spike_at: float | None, on_spike: OnSpike) -> None:
        self.spike_at = spike_at
        self.on_spike = on_spike
        self._good = 0
        self._norms = [math.nan] * WINDOW
        self._losses = [math.nan] * WINDOW

    def usual(self) -> Usual:
        """Return the limits for the next step."""
        if self._good < WARMUP:
            return Usual(math.nan)
        median = median_low(self._norms[: self._good])
        if self.spike_at is None or median == 0:
            return Usual(median)
        norm = self.spike_at * median
        if self.on_spike == "clip":
            return Usual(median, norm)
        losses = self._losses[: self._good]
        middle = median_low(losses)
        spread = max(MAD * median_low([abs(x - middle) for x in losses]), FLOOR * abs(middle))
        return Usual(median, norm, middle + ODD * spread, FAR * median)

    def add(self, norm: float, loss: float) -> None:
        """Remember a good step."""
        place = self._good % WINDOW
        self._norms[place], self._losses[place] = norm, loss
        self._good += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values, which JSON can hold."""
        norms, losses = ([None if math.isnan(x) else x for x in row] for row in (self._norms, self._losses))
        return {"good_steps": self._good, "norms": norms, "losses": losses}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned, of this release or of one that remembered no losses."""
        if "losses" not in saved:  # a loss cannot be judged, so the warm-up begins again
            self._good, self._norms, self._losses = 0, [math.nan] * WINDOW, [math.nan] * WINDOW
            return
        self._good = saved["good_steps"]
        self._norms, self._losses = ([math.nan if x is None else x for x in saved[k]] for k in ("norms", "losses"))
