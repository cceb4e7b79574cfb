"""The interface between the guard and a black box, such as `hfpatch.BlackBox`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hfpatch.given import having
from hfpatch.guarding.outcome import Facts, Reason
from hfpatch.report import say

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from hfpatch.guarding.judge import Judge

NEXT = (
    "next: pass black_box=hfpatch.BlackBox(DIR) to the guard: it keeps such a batch, runs it again and names the "
    "operation that went wrong; hfpatch.trace(model) does so for a batch that you run yourself"
)
"""End of the message of a `GuardStop` without a black box."""


@dataclass(frozen=True)
class Event:
    """A window that was skipped, or after which the run stops.

    Attributes:
        facts: The facts of the window.
        recent: The facts of the last windows, oldest first; the last is this one.
        counts: The guard's counters, by the name of their metric.
        scaler: State of the GradScaler after this window; None without one.
        stop: Why the run stops; None if it continues.
    """

    facts: Facts
    recent: tuple[Facts, ...]
    counts: dict[str, float]
    scaler: dict[str, Any] | None
    stop: str | None

    @property
    def stepped(self) -> bool:
        """True if the optimizer changed the weights after the window's forward passes."""
        return self.facts.kind == "stepped"


class Recorder(Protocol):
    """Follows the calls of one model. It never raises, and waits for a device only in `record`."""

    def end_micro_batch(self, loss: Tensor) -> None:
        """End a micro-batch: backward was called on this loss, which may be a share of the model's loss."""
        ...

    def end_window(self) -> Any:
        """End a window: return what was kept of its micro-batches. The recorder releases it."""
        ...

    def record(self, window: Any, event: Event) -> tuple[str, ...]:
        """Record an event; called before the weights change again.

        Returns:
            Lines to report: the finding and what to do next; at least one if the run stops.
        """
        ...

    def detach(self) -> None:
        """Stop following."""
        ...


class Box(Protocol):
    """The argument `black_box=` of a guard."""

    def attach(self, model: nn.Module) -> Recorder:
        """Follow the calls of a model from now on."""
        ...


BOX = having("an hfpatch.BlackBox", "attach")


def record_and_raise(
    recorder: Recorder | None, window: Any, judge: Judge, facts: Facts, scaler: torch.amp.GradScaler | None
) -> None:
    """Record a skip or a stop, then raise if the run has to stop. An ordinary overflow is not recorded.

    Raises:
        GuardStop: Too many skips in a row, or a weight is not finite.
    """
    ledger = judge.ledger
    told: tuple[str, ...] = ()
    skipped = facts.kind == "skipped" and facts.reason is not Reason.OVERFLOW
    if recorder is not None and (skipped or ledger.stopping):
        state: Any = scaler.state_dict() if scaler is not None else None
        told = recorder.record(window, Event(facts, tuple(ledger.recent), ledger.totals(), state, ledger.stopping))
        if ledger.verbose and ledger.stopping is None:
            say(told)
    ledger.raise_if_due(told or (NEXT,))
