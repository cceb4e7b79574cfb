"""The host's part of the decision: verdicts as facts, counters, history, and when a run must stop."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hfpatch.errors import GuardStop
from hfpatch.given import FLAG, NUMBER, REAL, WHOLE, Kind, optional, want
from hfpatch.guarding.history import OnSpike
from hfpatch.guarding.outcome import ADVICE, Facts, Reason
from hfpatch.report import say

ON_SPIKE = Kind("'skip' or 'clip'", lambda v: v in ("skip", "clip"))
FLOAT32 = 1.8e19
"""Norm beyond which a sum of squares passes float32."""
NAMED = 3
"""Parameters named in a message."""
RECENT = 64
"""Windows whose facts are kept, stepped or skipped."""


@dataclass(frozen=True)
class Limits:
    """When to skip and when to stop; documented in `Guard`."""

    explode_at: float | None = None
    spike_at: float | None = 10.0
    max_skips: int = 10
    min_scale: float = 1.0
    check_parameters: int = 1
    on_spike: OnSpike = "skip"
    clear_outside: bool = False

    def __post_init__(self) -> None:
        want("guard", explode_at=(self.explode_at, optional(REAL)), spike_at=(self.spike_at, optional(REAL)))
        want("guard", max_skips=(self.max_skips, WHOLE), min_scale=(self.min_scale, NUMBER))
        want("guard", check_parameters=(self.check_parameters, WHOLE), clear_outside=(self.clear_outside, FLAG))
        want("guard", on_spike=(self.on_spike, ON_SPIKE))


class Ledger:
    """Counts the judged windows. Plain Python: it holds no tensor.

    Args:
        names: Names of the judged parameters, in model order.
        limits: When to stop.
        verbose: Report skipped steps on stderr (rank 0).

    Attributes:
        steps: Windows so far, skipped ones included.
        skips: Skipped windows, by reason.
        in_row: Skipped windows in a row.
        empty: Empty micro-batches so far.
        clipped: Steps so far that stood out and were clipped to the median norm.
        history: The last skipped windows, oldest first, without overflows and windows with zero loss and gradients.
        recent: The last windows, oldest first.
    """

    def __init__(self, names: Sequence[str], limits: Limits, *, verbose: bool) -> None:
        self.names = names
        self.limits = limits
        self.verbose = verbose
        self.steps = 0
        self.skips: Counter[Reason] = Counter()
        self.in_row = 0
        self.empty = 0
        self.clipped = 0
        self.history: deque[Facts] = deque(maxlen=max(limits.max_skips, 20))
        self.recent: deque[Facts] = deque(maxlen=RECENT)
        self._stop: str | None = None

    def record(self, report: Sequence[float], squares: Sequence[float], outside: Sequence[str] = ()) -> Facts:
        """Count a window.

        Args:
            report: The figures, in the order of `Judge`.
            squares: Sum of squares of each parameter's gradient; read only if the step was skipped.
            outside: Parameters outside the optimizer whose gradients are not finite.
        """
        bad, filled, nans, told, loss, learned, ruined, count, *judged = report
        total, median, exploded, spiked, clipped, scale, skip, unfilled = judged
        self.steps += 1
        reason = None
        if skip and unfilled:
            reason = Reason.NO_LABELS if nans or told else Reason.ZERO
        elif skip:
            reason = self._reason(bad, total, exploded, spiked, scale)
        facts = Facts(
            step=self.steps,
            kind="stepped" if reason is None else "skipped",
            reason=reason,
            loss=loss,
            learned=learned * count / (count - nans) if nans < count else math.nan,
            norm=total,
            median=median,
            scale=None if math.isnan(scale) else scale,
            empty=round(count - filled),
            micro_batches=round(count),
            blame=() if reason is None else self._blame(reason, [math.sqrt(s) for s in squares], outside),
            clipped=bool(clipped),
        )
        self._count_clipped(facts)
        self.empty += facts.empty
        self.recent.append(facts)
        if reason is None:
            self.in_row = 0
        else:
            self._count(facts, reason)
        if ruined:
            self.stop("guard: parameters are not finite after the previous step; go back to an earlier checkpoint")
        return facts

    def stop(self, message: str) -> None:
        """Have `raise_if_due` raise with this message; if called again before that, the first message stays."""
        self._stop = self._stop or message

    @property
    def stopping(self) -> str | None:
        """The message that `raise_if_due` will raise; None if it will not raise."""
        return self._stop

    def raise_if_due(self, lines: Sequence[str] = ()) -> None:
        """Raise if the run has to stop.

        Args:
            lines: Lines at the end of the message.

        Raises:
            GuardStop: Too many skips in a row, or a weight is not finite.
        """
        if self._stop is not None:
            message, self._stop = self._stop, None
            raise GuardStop("\n".join([message, *lines]), tuple(self.history))

    def totals(self) -> dict[str, float]:
        """Return the counts so far, as metrics named `guard/...`."""
        named = {r: n for r, n in self.skips.items() if r is not Reason.OVERFLOW}
        return {
            "guard/skipped": float(sum(named.values())),
            "guard/overflows": float(self.skips[Reason.OVERFLOW]),
            "guard/clipped": float(self.clipped),
            "guard/empty_micro_batches": float(self.empty),
            **{f"guard/skipped_{r.name.lower()}": float(n) for r, n in named.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {
            "steps": self.steps,
            "skips": {r.name: n for r, n in self.skips.items()},
            "in_row": self.in_row,
            "empty": self.empty,
            "clipped": self.clipped,
            "history": [f.to_dict() for f in self.history],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.steps, self.in_row, self.empty = saved["steps"], saved["in_row"], saved["empty"]
        self.clipped = saved.get("clipped", 0)
        self.skips = Counter({Reason[name]: n for name, n in saved["skips"].items()})
        self.history.clear()
        self.history.extend(Facts.from_dict(f) for f in saved["history"])

    def _reason(self, bad: float, total: float, exploded: float, spiked: float, scale: float) -> Reason:
        if bad:
            return Reason.LOSS
        if not math.isfinite(total):
            if math.isnan(scale):
                return Reason.GRADIENTS
            return Reason.COLLAPSED if scale < self.limits.min_scale else Reason.OVERFLOW
        if exploded or total > FLOAT32:
            return Reason.EXPLOSION
        return Reason.SPIKE if spiked else Reason.PARAMETERS

    def _blame(self, reason: Reason, norms: list[float], outside: Sequence[str]) -> tuple[str, ...]:
        found: list[str] = []
        broken = [n for n, norm in zip(self.names, norms, strict=True) if not math.isfinite(norm)]
        if reason in (Reason.EXPLOSION, Reason.SPIKE):
            largest = sorted(zip(norms, self.names, strict=True), reverse=True)[:NAMED]
            found.append("largest gradients: " + ", ".join(f"{name} ({norm:.3g})" for norm, name in largest))
        elif broken and reason is not Reason.OVERFLOW:
            # backward runs from the last layer to the first, so the last bad gradient in model order came first
            nearest = ", ".join(broken[: -NAMED - 1 : -1])
            found.append(f"{len(broken)} of {len(norms)} gradients not finite, nearest the loss: {nearest}")
        if outside:
            done = "cleared" if self.limits.clear_outside else "left as they are (clear_outside=True clears them)"
            found.append(
                f"{len(outside)} gradients of parameters outside the optimizer are not finite either: "
                f"{', '.join(outside[:NAMED])}; {done}"
            )
        return tuple(found)

    def require_a_step(self) -> None:
        """Raise if there were steps and every one was skipped.

        Raises:
            GuardStop: The run has changed no weight.
        """
        if self.steps and sum(self.skips.values()) == self.steps:
            kinds = ", ".join(f"{n} x {r}" for r, n in self.skips.items())
            advice = [f"{r}: {ADVICE[r]}" for r in self.skips]
            message = f"guard: every one of {self.steps} steps was skipped ({kinds}): the run has changed no weight"
            raise GuardStop("\n".join([message, *advice]), tuple(self.history))

    def _count_clipped(self, facts: Facts) -> None:
        if not facts.clipped:
            return
        self.clipped += 1
        if self.verbose and self.clipped == 1:
            say([f"guard: {facts}; further such steps are counted but not reported"])

    def _count(self, facts: Facts, reason: Reason) -> None:
        self.skips[reason] += 1
        if reason is Reason.ZERO and self.verbose and self.skips[reason] == 1:
            say([f"guard: {facts}; further such steps are counted but not reported"])
        if reason in (Reason.OVERFLOW, Reason.ZERO):
            return  # neither adds to the row of skips nor ends it
        self.in_row += 1
        self.history.append(facts)
        if self.verbose:
            say([f"guard: {facts}"])
        if self.in_row >= self.limits.max_skips:
            row = list(self.history)[-self.in_row :]
            kinds = Counter(f.reason for f in row if f.reason is not None)
            self.stop(
                "\n".join(
                    [
                        f"guard: {self.in_row} steps in a row were skipped ({row[0].step} to {row[-1].step}): "
                        + ", ".join(f"{n} x {r}" for r, n in kinds.items())
                        + f"; the weights are those after step {row[0].step - 1}.",
                        f"last: {facts}",
                        *(f"{r}: {ADVICE[r]}" for r in kinds),
                    ]
                )
            )
