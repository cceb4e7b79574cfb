"""How far the tensors of a healthy pass are from the limits of a narrower dtype."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hfpatch.dtypes import dtype_name
from hfpatch.errors import InputError
from hfpatch.given import shown
from hfpatch.report.sheet import Sheet
from hfpatch.tracing.events import Event, Phase, Step

FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
SHOWN = 12


@dataclass(frozen=True)
class Room:
    """One tensor in a narrower dtype.

    Attributes:
        phase, module, tensor: Which.
        largest: Its largest magnitude over the traced steps; a gradient's under the loss scale asked for.
        overflow: `largest` over the dtype's largest value; above 1 it becomes infinite.
        flush: The dtype's smallest magnitude over `largest`; above 1 all of it becomes 0.
        lost: Share of its elements, 0 to 1, that become 0 though they are not; None for scaled gradients.
    """

    phase: Phase
    module: str
    tensor: str
    largest: float
    overflow: float
    flush: float
    lost: float | None


@dataclass(frozen=True)
class Headroom:
    """What a dtype would do to the tensors of the traced steps, in the order they were made.

    Attributes:
        dtype: Name of the dtype.
        loss_scale: Factor on the gradients.
        rooms: Every tensor that was measured.
    """

    dtype: str
    loss_scale: float
    rooms: tuple[Room, ...]

    @property
    def overflows(self) -> tuple[Room, ...]:
        """Tensors that would hold an infinity, in the order they were made: the first is where it starts."""
        return tuple(r for r in self.rooms if r.overflow > 1)

    @property
    def flushes(self) -> tuple[Room, ...]:
        """Tensors of which nothing would be left."""
        return tuple(r for r in self.rooms if r.flush > 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"dtype": self.dtype, "loss_scale": self.loss_scale, "tensors": [asdict(r) for r in self.rooms]}

    def to_sheet(self) -> Sheet:
        """What overflows, what is lost, and how near the nearest is where nothing does."""
        over, gone = self.overflows, self.flushes
        scale = f", gradients under a loss scale of {self.loss_scale:,.0f}" if self.loss_scale != 1 else ""
        near = sorted(self.rooms, key=lambda r: -r.overflow)[:5]
        shown = [*over[:SHOWN], *gone[:SHOWN]] or near
        rows = tuple(
            (
                "overflows" if r.overflow > 1 else "becomes 0" if r.flush > 1 else "fits",
                f"{r.tensor} of {r.module or 'the model'}",
                f"{r.largest:.4g}",
                f"{r.overflow:.3g} x limit" if r.overflow > 1 or r.flush <= 1 else f"{r.flush:.3g} x too small",
            )
            for r in shown
        )
        half = [r for r in self.rooms if r.flush <= 1 and (r.lost or 0) > 0.5]
        notes = [
            f"{len(over)} of {len(self.rooms)} tensors overflow, {len(gone)} vanish{scale}."
            + (f" It starts at {over[0].tensor} of {over[0].module or 'the model'}." if over else "")
        ]
        if half:
            notes.append(
                f"{len(half)} more lose over half of their elements to 0, e.g. {half[0].tensor} of {half[0].module}."
            )
        return Sheet(f"headroom in {self.dtype}", ("", "tensor", "max |x|", ""), rows, tuple(notes), wide=("tensor",))

    def __str__(self) -> str:
        return self.to_sheet().to_text()

    def _repr_html_(self) -> str:
        return self.to_sheet().to_html()


def headroom(steps: Iterable[Step], dtype: str | torch.dtype, loss_scale: float = 1.0) -> Headroom:
    """See `Trace.headroom`."""
    name = dtype_name(dtype) if isinstance(dtype, (str, torch.dtype)) else shown(dtype)  # pyright: ignore[reportUnnecessaryIsInstance]
    if name not in FORMATS:
        raise InputError(f"headroom in {name!r}: want one of {', '.join(FORMATS)}")
    info = torch.finfo(getattr(torch, name))
    top, smallest = float(info.max), float(info.smallest_normal) * float(info.eps) / 2
    found: dict[tuple[Phase, str, str], Room] = {}
    for step in steps:
        for event in step.events:
            if event is step.start or not _counts(event):
                continue
            scaled = event.phase in ("backward", "gradients") and (loss_scale != 1 or step.scale not in (None, 1.0))
            largest = event.stats.largest * (loss_scale / (step.scale or 1.0) if scaled else 1.0)
            key = (event.phase, event.module, event.what)
            known = found.get(key)
            if known is None or largest > known.largest:
                lost = None if scaled else event.stats.under.get(name, 0.0)
                flush = smallest / largest if largest else 0.0
                found[key] = Room(*key, largest=largest, overflow=largest / top, flush=flush, lost=lost)
    return Headroom(name, loss_scale, tuple(found.values()))


def _counts(event: Event) -> bool:
    """Whether a tensor would be held in the narrower dtype: not a buffer, not a mask of a dtype's lowest value."""
    stats = event.stats
    if event.role == "buffer" or event.against or stats.size == 0:
        return False
    mask = (
        stats.most is not None
        and stats.least is not None
        and stats.most <= 0
        and stats.least <= 0.9 * _lowest(event.dtype)
    )
    return not mask


def _lowest(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).min)
