"""What a traced step saw, as data: one event a tensor, its statistics joined to it when the step is over."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Phase = Literal["weights", "forward", "backward", "gradients"]
"""`weights`: parameters and buffers before the forward pass; `gradients`: those of parameters, after the backward."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of one tensor.

    Attributes:
        size: Elements.
        nan, posinf, neginf: Elements that are.
        least, most: Of the finite elements; None where there is none.
        mean, rms: Of the finite elements that were counted.
        zeros: Share of exact zeros, 0 to 1, of those counted.
        under: Share of elements, not 0, that are 0 in `float16`, `float8_e5m2`, `float8_e4m3fn`.
        counted: Elements behind mean, rms and the shares: all, or on a CPU a sample of a large tensor.
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
        """Largest magnitude of a finite element; 0 where there is none."""
        return max(abs(self.least), abs(self.most)) if self.least is not None and self.most is not None else 0.0

    @property
    def nonfinite(self) -> int:
        """Elements that are NaN or infinite."""
        return self.nan + self.posinf + self.neginf

    @property
    def holds(self) -> str:
        """What is not finite, in words."""
        parts = [
            f"{count:,} {name}"
            for count, name in ((self.nan, "NaN"), (self.posinf, "+Inf"), (self.neginf, "-Inf"))
            if count
        ]
        return f"{' and '.join(parts)} of {self.size:,} elements" if parts else f"finite, up to {self.largest:.4g}"


@dataclass(slots=True)
class Event:
    """One tensor at one place in one step.

    Attributes:
        index: Position in the step, in the order things happened.
        phase: When.
        module: Path of the module it went into, came out of or belongs to.
        role: `input`, `output`, or `parameter` and `buffer`; a gradient has the role of its tensor.
        name: Of the tensor there: `hidden_states`, `logits`, `0`, `weight`; empty for a lone output.
        number: Of the module's call in this step.
        dtype, shape: Of the tensor.
        device, row: Where its row of statistics is, and its number there.
        table: The rows of that device, once the step is over.
        within: Path and number of the innermost kept call in which the tensor was made; None outside of all.
        forward: For a gradient, the event of its tensor; None if that was recomputed under checkpointing.
        against: It is the difference of a buffer from what its module computes when it is built.
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
    table: torch.Tensor | None = None
    within: tuple[str, int] | None = None
    forward: int | None = None
    against: bool = False
    read: Stats | None = None

    @property
    def stats(self) -> Stats:
        """The statistics; there are some once the step is over."""
        if self.read is None:
            if self.table is None:
                raise RuntimeError("this step is not over: its statistics are still on their device")
            self.read = stats(self.table[self.row].tolist(), math.prod(self.shape))
        return self.read

    @property
    def what(self) -> str:
        """The tensor in words."""
        name = f" {self.name!r}" if self.name else ""
        lead = "gradient of " if self.phase in ("backward", "gradients") else ""
        return f"{lead}{self.role}{name}"

    @property
    def bad(self) -> bool:
        """Whether it holds something that is not finite."""
        return self.stats.nonfinite > 0 and not self.against


@dataclass
class Step:
    """A traced step: one call of the model and the backward pass that followed.

    Attributes:
        number: Calls of the model before it.
        epoch: Entries of the trace before this one.
        events: In the order they happened.
        start: The gradient that the backward pass started with, if the model gave a loss.
        unseen: A backward pass of this step came after the step was over: the model had been called again, or the
            trace been asked.
    """

    number: int
    epoch: int
    events: list[Event] = field(default_factory=list[Event])
    start: Event | None = None
    unseen: bool = False

    def of(self, phase: Phase) -> list[Event]:
        """Events of one phase."""
        return [e for e in self.events if e.phase == phase]

    @property
    def scale(self) -> float | None:
        """What the loss was multiplied by (a loss scale, over accumulation steps); None if that is not known."""
        return None if self.start is None else self.start.stats.largest or None

    def close(self, tables: dict[torch.device, torch.Tensor]) -> bool:
        """Give the events their statistics; whether any of them is worth a look: not finite, all zero, or compared."""
        for event in self.events:
            event.table = tables[event.device]
        odd = any(bool((t[:, :3].sum(1) > 0).any() | ((t[:, 7] == 0) & (t[:, 8] == 0)).any()) for t in tables.values())
        return odd or any(e.against for e in self.events)


def stats(row: list[float], size: int) -> Stats:
    """Statistics from a row of `hfpatch.numerics.statistics`."""
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
