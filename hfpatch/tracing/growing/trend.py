"""How the factor of a place develops over several traced steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hfpatch.report.sheet import Sheet, Shown
from hfpatch.tracing.events import Step
from hfpatch.tracing.growing.flow import Change, Direction, changes
from hfpatch.tracing.growing.thresholds import excess

Place = tuple[Direction, str, str]
"""Direction, kind of change, and path."""
SHOWN = 3
"""Steps from which on a doubling time is given."""


@dataclass(frozen=True)
class Course:
    """The factors of one place over the traced steps.

    Attributes:
        direction: `forward` or `backward`.
        kind: `block`, `inside`, `own code` or `stack`, as in `hfpatch.tracing.growing.flow.Change`.
        path: Path of the block, container or list.
        steps: `Step.number` of each step.
        factors: The largest factor there in each of these steps; of a place where the signal vanishes, the smallest.
        first: The first step in which it stood out; None if it did in none.
        doubling: Steps in which the factor doubled, by the slope through the logarithms; negative if it halved; None
            if it did neither, or fewer than three steps were traced.
    """

    direction: Direction
    kind: str
    path: str
    steps: tuple[int, ...]
    factors: tuple[float, ...]
    first: int | None
    doubling: float | None

    @property
    def sentence(self) -> str:
        """`backward in layers.3: 1.1-fold in step 0, 4e+03-fold in step 40; stood out from step 20; doubles in 3.3`."""
        place = self.path or "the model"
        words = (
            f"{self.direction} in {place}: {self.factors[0]:.2g}-fold in step {self.steps[0]}, "
            f"{self.factors[-1]:.2g}-fold in step {self.steps[-1]}"
        )
        if self.first is not None:
            words += f"; stood out from step {self.first}"
        if self.doubling is not None:
            words += f"; {'doubles' if self.doubling > 0 else 'halves'} in {abs(self.doubling):.2g} steps"
        return words


@dataclass(frozen=True, repr=False)
class Trend(Shown):
    """How factors develop over the traced steps: of the places that were found, and of the largest in each direction.

    Attributes:
        courses: One for each place.
    """

    courses: tuple[Course, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return `{"courses": [...]}`."""
        return {"courses": [asdict(c) for c in self.courses]}

    def sheet(self) -> Sheet:
        """Return one row for each place."""
        rows = tuple(
            (
                c.path or "(model)",
                c.direction,
                c.kind,
                f"{c.factors[0]:.3g}",
                f"{c.factors[-1]:.3g}",
                "-" if c.first is None else str(c.first),
                "-" if c.doubling is None else f"{c.doubling:.3g}",
            )
            for c in self.courses
        )
        columns = ("place", "", " ", "first", "last", "stood out", "doubles in")
        notes = ("first, last: factor of the RMS in the first and the last step; stood out, doubles in: in steps",)
        return Sheet("Factors over the traced steps", columns, rows, notes if rows else ("No step.",), wide=("place",))


def trend(steps: Sequence[Step], found: Iterable[Place]) -> Trend:
    """Return the development of the places that were found, and of the block with the largest factor each way.

    Args:
        steps: Traced steps, in order.
        found: The places.
    """
    seen: dict[Place, dict[int, Change]] = {}
    for index, step in enumerate(steps):
        for change in changes(step):
            place = change.direction, change.kind, change.path
            here = seen.setdefault(place, {})
            if index not in here or excess(change) > excess(here[index]):
                here[index] = change
    wanted = dict.fromkeys(p for p in found if p in seen)
    for direction in ("forward", "backward"):
        blocks = [p for p in seen if p[:2] == (direction, "block")]
        if blocks:
            wanted.setdefault(max(blocks, key=lambda p: max(c.factor for c in seen[p].values())))
    return Trend(tuple(_course(place, seen[place], steps) for place in wanted))


def _course(place: Place, found: dict[int, Change], steps: Sequence[Step]) -> Course:
    numbers = tuple(steps[i].number for i in found)
    factors = tuple(c.factor for c in found.values())
    first = next((steps[i].number for i, c in found.items() if excess(c) > 1), None)
    return Course(*place, numbers, factors, first, _doubling(numbers, factors))


def _doubling(numbers: Sequence[int], factors: Sequence[float]) -> float | None:
    """Return the steps in which factors double, by a line through their logarithms; None where it is flat or short."""
    if len(numbers) < SHOWN or len(set(numbers)) < SHOWN:
        return None
    logs = [math.log2(f) for f in factors]
    slope = statistics.linear_regression(numbers, logs).slope
    return 1 / slope if abs(slope) * (numbers[-1] - numbers[0]) > 1 else None
