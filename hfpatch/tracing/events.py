"""The record of a traced step, as data: one event per tensor, which gets its statistics when the step is over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from hfpatch.numerics.statistics import Rows

Phase = Literal["weights", "forward", "backward", "gradients"]
"""`weights`: parameters and buffers before the forward pass; `gradients`: those of parameters, after the backward."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of one tensor.

    Attributes:
        size: Number of elements.
        nan, posinf, neginf: Number of elements that are NaN, +Inf and -Inf.
        least, most: Smallest and largest finite element; None if there is none.
        mean, rms: Of the finite elements that were counted.
        zeros: Share of exact zeros among the counted elements, 0 to 1.
        under: Share of counted elements, 0 to 1, that are not 0 and become 0 in `float16`, `float8_e5m2` and
            `float8_e4m3fn`, by dtype.
        counted: Number of elements behind mean, rms and the shares: all, or on a CPU a sample of a large tensor. On a
            GPU the shares of a large tensor are estimated from a part of it.
    """

    size: int
    nan: int
    posinf: int
    neginf: int
    least: float | None
    most: float | None
    mean: float
    rms: float
    zeros: float
    under: dict[str, float]
    counted: int

    @property
    def largest(self) -> float:
        """Largest magnitude of a finite element; 0 if there is none."""
        return max(abs(self.least), abs(self.most)) if self.least is not None and self.most is not None else 0.0

    @property
    def nonfinite(self) -> int:
        """Number of elements that are NaN or infinite."""
        return self.nan + self.posinf + self.neginf

    @property
    def holds(self) -> str:
        """Description of the bad values; of the range if all are finite."""
        parts = [
            f"{count:,} {name}"
            for count, name in ((self.nan, "NaN"), (self.posinf, "+Inf"), (self.neginf, "-Inf"))
            if count
        ]
        return f"{' and '.join(parts)} of {self.size:,} elements" if parts else f"finite, up to {self.largest:.4g}"


class Table:
    """The rows of `hfpatch.numerics.statistics` of one device, once the step is over; as numbers when they are asked.

    Args:
        found: Float64 `[rows, columns]`.
    """

    def __init__(self, found: torch.Tensor) -> None:
        self._found = found

    @cached_property
    def rows(self) -> list[list[float]]:
        """All columns."""
        return self._found.tolist()


@dataclass(slots=True)
class Event:
    """One tensor at one place in one step.

    Attributes:
        index: Position in `Step.events`, in order of time.
        phase: `weights`, `forward`, `backward` or `gradients`.
        module: Path of the module of which it is an input, output, parameter or buffer.
        role: `input`, `output`, `parameter` or `buffer`; a gradient has the role of its tensor.
        name: Name of the tensor there: `hidden_states`, `logits`, `0`, `weight`; empty for a single output.
        number: Calls of the module before this one, in this step.
        dtype, shape: Of the tensor; the shape of this rank's part.
        device, row: Device and index of its row of statistics.
        table: The rows of that device, once the step is over.
        within: Path and number of the innermost kept call in which the tensor was made; None outside of all calls.
        forward: For a gradient, the event of its tensor; None if that was recomputed under checkpointing.
        is_difference: True if this is the difference of a buffer from the value its module computes at build.
        read: The statistics, once they were read.
        rms, nonfinite: As in `stats`, once the step is over.
        late: True if the tensor was written to in place before it was measured: the statistics are of its later values.
    """

    index: int
    phase: Phase
    module: str
    role: Literal["input", "output", "parameter", "buffer"]
    name: str
    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device
    row: int
    table: Table | None = None
    within: tuple[str, int] | None = None
    forward: int | None = None
    is_difference: bool = False
    read: Stats | None = None
    rms: float = 0.0
    nonfinite: int = 0
    late: bool = False

    @property
    def stats(self) -> Stats:
        """Statistics of the tensor.

        Raises:
            RuntimeError: The step is not over.
        """
        if self.read is None:
            if self.table is None:
                raise RuntimeError("step statistics are still on their device; leave the trace before reading them")
            self.read = stats(self.table.rows[self.row], self.size)
        return self.read

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def label(self) -> str:
        """Description of the tensor: role and name, such as `gradient of output 'logits'`."""
        name = f" {self.name!r}" if self.name else ""
        lead = "gradient of " if self.phase in ("backward", "gradients") else ""
        late = " (as it was after a later operation wrote to it in place)" if self.late else ""
        return f"{lead}{self.role}{name}{late}"

    @property
    def bad(self) -> bool:
        """True if it holds a NaN or an infinity; False for a difference of buffers."""
        nonfinite = self.nonfinite if self.table is not None else self.stats.nonfinite
        return nonfinite > 0 and not self.is_difference


@dataclass(slots=True)
class Passage:
    """One call of a module in a step.

    Attributes:
        path, number: Path of the module, and its calls before this one.
        inputs, outputs: Indices in `Step.events` of the floating-point tensors that it was given and that it returned.
        returned: Its place in the order in which the calls returned; -1 if it did not.
    """

    path: str
    number: int
    inputs: list[int] = field(default_factory=list[int])
    outputs: list[int] = field(default_factory=list[int])
    returned: int = -1


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that a container ran itself, between the calls of its parts, in the backward pass.

    Attributes:
        path, number: The call of the container.
        node: Name of the backward function: `DivBackward0`.
        region: Number of the tensor that this piece of code made.
        given: The gradient that the operation was given.
        made: The gradients that it made.
        leaving: For each of them, True if it goes to another module.
    """

    path: str
    number: int
    node: str
    region: int
    given: Event
    made: tuple[Event, ...]
    leaving: tuple[bool, ...]


@dataclass
class Step:
    """A traced step: one call of the model and the backward pass that followed.

    Attributes:
        number: Index of the call of the model, from 0.
        epoch: Index of the entry of the trace, from 0.
        blocks: Paths of the model's blocks.
        events: Its events, in order of time.
        passages: Its calls of modules, in the order in which they began.
        own_code: Operations that containers ran themselves, in the order of the backward pass.
        start: The gradient of the loss, with which the backward pass started; None if it did not start at a scalar
            output of the model.
        unseen: True if a backward pass of this step ran after the step was over, because the model had been called
            again or the trace had been read.
    """

    number: int
    epoch: int
    blocks: frozenset[str] = frozenset()
    events: list[Event] = field(default_factory=list[Event])
    passages: list[Passage] = field(default_factory=list[Passage])
    own_code: list[Operation] = field(default_factory=list[Operation])
    start: Event | None = None
    unseen: bool = False

    def of(self, phase: Phase) -> list[Event]:
        """Return the events of one phase."""
        return [e for e in self.events if e.phase == phase]

    @property
    def scale(self) -> float | None:
        """Factor on the loss (the loss scale divided by the accumulation steps); None if it is not known."""
        return None if self.start is None else self.start.stats.largest or None

    def close(self, rows: Mapping[torch.device, Rows]) -> bool:
        """Give the events their statistics; True if any needs a diagnosis: not finite, all zero, or compared."""
        within = [e for operation in self.own_code for e in (operation.given, *operation.made)]
        events = [*self.events, *within]
        odd = False
        for device, gathered in rows.items():
            found = gathered.read()
            table, late = Table(found), gathered.late
            bad = found[:, :3].sum(1)
            odd = odd or bool(((bad > 0) | ((found[:, 7] == 0) & (found[:, 8] == 0))).any())
            rms = (found[:, 10].clamp(min=0) / found[:, 11].clamp(min=1)).sqrt().tolist()
            nonfinite = bad.long().tolist()
            for event in events if len(rows) == 1 else [e for e in events if e.device == device]:
                row = event.row
                event.table, event.rms, event.nonfinite = table, rms[row], nonfinite[row]
                event.late = row in late
        return odd or any(e.is_difference for e in self.events)

    def overwritten(self) -> set[tuple[str, str, str]]:
        """Return module, role and name of the tensors that were written to in place before they were measured."""
        return {(e.module, e.role, e.name) for e in self.events if e.late}


def stats(row: list[float], size: int) -> Stats:
    """Return the statistics in a row of `hfpatch.numerics.statistics`."""
    nan, posinf, neginf, zeros, f16, e5m2, e4m3, least, most, total, squares, counted = row
    finite = math.isfinite(least)
    n = max(counted, 1.0)
    return Stats(
        size=size,
        nan=int(nan),
        posinf=int(posinf),
        neginf=int(neginf),
        least=least if finite else None,
        most=most if finite else None,
        mean=total / n,
        rms=math.sqrt(max(squares, 0.0) / n),
        zeros=zeros / n,
        under={"float16": f16 / n, "float8_e5m2": e5m2 / n, "float8_e4m3fn": e4m3 / n},
        counted=int(counted),
    )
