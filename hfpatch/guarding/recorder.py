"""What the guard asks of a black box, and when it asks.

The guard knows no more of one than this: `hfpatch.BlackBox` is one, and lies above.
"""

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
    "operation that went wrong; hfpatch.trace(model) does so for a batch of yours"
)
"""How the message of a stop ends where there was no black box."""


@dataclass(frozen=True)
class Event:
    """A window that was skipped, or after which the run stops.

    Attributes:
        facts: The window.
        recent: The last windows, oldest first, this one at the end.
        counts: The guard's counters, by the name of their metric.
        scaler: State of the GradScaler, after this window; None without one.
        stop: Why the run stops, in words; None if it goes on.
    """

    facts: Facts
    recent: tuple[Facts, ...]
    counts: dict[str, float]
    scaler: dict[str, Any] | None
    stop: str | None

    @property
    def moved(self) -> bool:
        """Whether the weights were changed after the window's forward passes."""
        return self.facts.kind == "stepped"


class Recorder(Protocol):
    """Follows the calls of one model. It never raises, and never waits for a device but in `record`."""

    def noted(self, loss: Tensor) -> None:
        """A micro-batch ended: backward was called on this loss, which may be a share of the model's."""
        ...

    def window(self) -> Any:
        """A window ended: what was kept of its micro-batches. The recorder lets go of it."""
        ...

    def record(self, window: Any, event: Event) -> tuple[str, ...]:
        """Write down an event; called before the weights change again.

        Returns:
            What to tell: what was found, and what to do next; at least one line if the run stops.
        """
        ...

    def detach(self) -> None:
        """Stop following."""
        ...


class Box(Protocol):
    """What is passed as `black_box=`."""

    def attach(self, model: nn.Module) -> Recorder:
        """Follow the calls of a model from now on."""
        ...


BOX = having("an hfpatch.BlackBox", "attach")


def conclude(
    recorder: Recorder | None, window: Any, judge: Judge, facts: Facts, scaler: torch.amp.GradScaler | None
) -> None:
    """Have an event written down, then raise what is due. An ordinary overflow of the loss scale is no event.

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
