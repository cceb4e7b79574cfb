"""The largest gradients of a trace, by name, and where the gradient became large."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from hfpatch.report.sheet import Sheet, Shown, finite
from hfpatch.tracing.events import Event, Step

LARGE = 1e3
"""Times the gradient with which a backward pass starts, above which a gradient counts as large."""


class LargestGradients(Shown, list[tuple[str, float]]):
    """Names of parameters with the largest magnitude of their gradients, largest first; a list that prints as a table.

    A gradient that holds a NaN or an infinity counts as infinity; of several, the one that backward reached first comes
    first. If the gradient became large on its way, the parameters of the module where it did so come before all others.

    Attributes:
        began: Where the gradient became large, as a sentence; empty if it did not.
    """

    def __init__(self, found: Iterable[tuple[str, float]] = (), began: str = "") -> None:
        super().__init__(found)
        self.began = began

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON: gradients (name, largest: null where it is not finite), began."""
        rows = [{"name": name, "largest": finite(largest)} for name, largest in self]
        return {"gradients": rows, "began": self.began}

    def sheet(self) -> Sheet:
        """Return it as a table."""
        rows = tuple((name, f"{largest:.4g}") for name, largest in self)
        notes = () if rows else ("No gradient was seen.",)
        notes = (*notes, self.began) if self.began else notes
        return Sheet("Largest gradients", ("parameter", "max |grad|"), rows, notes, wide=("parameter",))


def largest(steps: Sequence[Step], count: int) -> LargestGradients:
    """Return the parameters with the largest gradients in some traced steps, and where the gradient became large."""
    sizes: dict[str, float] = {}
    order: dict[str, tuple[int, int]] = {}
    first: set[str] = set()
    began = ""
    for number, step in enumerate(steps):
        reached = _reached(step)
        place = _beginning(step) if not began else None
        owner = None
        for event in step.of("gradients"):
            name = f"{event.module}.{event.name}" if event.module else event.name
            size = _size(event)
            when = _when(event.module, reached)
            if name not in sizes or (size == math.inf and sizes[name] < math.inf):
                order[name] = (number, when)
            sizes[name] = max(sizes.get(name, 0.0), size)
            if place is not None and when >= place[1].index and (owner is None or when < owner):
                owner = when
        if place is not None:
            began = _sentence(*place, step if len(steps) > 1 else None)
            first = {n for n, (at, when) in order.items() if at == number and when == owner}
    names = sorted(sizes, key=lambda n: (n not in first, -sizes[n], order[n]))
    return LargestGradients([(n, sizes[n]) for n in names[:count]], began)


def _size(event: Event) -> float:
    return math.inf if event.bad else event.stats.largest


def _reached(step: Step) -> dict[str, int]:
    """Return when backward reached the output of each module, as an index of events."""
    found: dict[str, int] = {}
    for event in step.of("backward"):
        if event.role == "output" and event.module:
            found.setdefault(event.module, event.index)
    return found


def _when(path: str, reached: dict[str, int]) -> int:
    """Return when backward reached a module, or the innermost module around it that was seen."""
    while path and path not in reached:
        path = path.rpartition(".")[0]
    return reached.get(path, 2**62)


def _beginning(step: Step) -> tuple[Event, Event] | None:
    """Return the last event of a backward pass before its gradient was large, and the first at which it is."""
    events = step.of("backward")
    starts = [e for e in events if not e.module and e.role == "output" and not e.bad]
    base = step.scale or max((e.stats.largest for e in starts), default=0.0)
    last: Event | None = None
    for event in events:
        if not base and not event.bad:
            base = event.stats.largest
        if last is not None and (event.bad or (base and _size(event) > LARGE * base)):
            return last, event
        if event.bad:
            return None  # it started so
        last = event
    return None


def _sentence(before: Event, event: Event, step: Step | None) -> str:
    here = f" in step {step.number}" if step is not None else ""
    now = event.stats.holds if event.bad else f"{event.stats.largest:.4g}"
    return (
        f"The gradient became large{here} between {_place(before)} ({before.stats.largest:.4g} at most) and "
        f"{_place(event)} ({now})."
    )


def _place(event: Event) -> str:
    name = f" {event.name!r}" if event.name else ""
    return f"{event.role}{name} of {event.module or 'the model'}"
