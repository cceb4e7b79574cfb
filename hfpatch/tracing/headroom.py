"""How far the tensors of a trace are from the limits of a narrower dtype."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hfpatch.deprecated import warn
from hfpatch.dtypes import dtype_name
from hfpatch.errors import InputError
from hfpatch.given import shown
from hfpatch.report.sheet import Sheet, Shown, finite
from hfpatch.tracing.events import Event, Phase, Step

FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
SHOWN = 12


@dataclass(frozen=True)
class TensorHeadroom:
    """One tensor in a narrower dtype.

    Attributes:
        phase, module, tensor: Phase of the step, path of the module, and description of the tensor.
        largest: Its largest magnitude over the traced steps; for a gradient, under the requested loss scale.
        overflow: `largest` divided by the dtype's largest value; above 1 it becomes infinite.
        flush: The magnitude at and below which the dtype rounds to 0, divided by `largest`; above 1 every element
            becomes 0.
        lost: Share of its elements, 0 to 1, that become 0 though they are not; None for scaled gradients.
    """

    phase: Phase
    module: str
    tensor: str
    largest: float
    overflow: float
    flush: float
    lost: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what is not finite is null."""
        return {k: finite(v) if isinstance(v, float) else v for k, v in vars(self).items()}


@dataclass(frozen=True, repr=False)
class Headroom(Shown):
    """The range of the traced tensors compared with that of a narrower dtype.

    Attributes:
        dtype: Name of the dtype.
        loss_scale: Factor on the gradients.
        tensors: Every tensor that was measured, in the order they were made.
        advice: What patches do about those that overflow, a sentence each.
    """

    dtype: str
    loss_scale: float
    tensors: tuple[TensorHeadroom, ...]
    advice: tuple[str, ...] = ()

    @property
    def overflows(self) -> tuple[TensorHeadroom, ...]:
        """Tensors that would overflow, in the order they were made."""
        return tuple(r for r in self.tensors if r.overflow > 1)

    @property
    def flushes(self) -> tuple[TensorHeadroom, ...]:
        """Tensors of which every element would become 0."""
        return tuple(r for r in self.tensors if r.flush > 1)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: `{"dtype", "loss_scale", "tensors": [...], "advice": [...]}`."""
        tensors = [r.to_dict() for r in self.tensors]
        return {"dtype": self.dtype, "loss_scale": self.loss_scale, "tensors": tensors, "advice": list(self.advice)}

    def sheet(self) -> Sheet:
        """Return a table of the tensors that overflow or become 0; if there are none, of the five largest."""
        over, gone = self.overflows, self.flushes
        scale = f", gradients under a loss scale of {self.loss_scale:,.0f}" if self.loss_scale != 1 else ""
        near = sorted(self.tensors, key=lambda r: -r.overflow)[:5]
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
        half = [r for r in self.tensors if r.flush <= 1 and (r.lost or 0) > 0.5]
        notes = [
            f"{len(over)} of {len(self.tensors)} tensors overflow, {len(gone)} vanish{scale}."
            + (f" It starts at {over[0].tensor} of {over[0].module or 'the model'}." if over else "")
        ]
        if half:
            notes.append(
                f"{len(half)} more lose over half of their elements to 0, e.g. {half[0].tensor} of {half[0].module}."
            )
        notes += self.advice
        return Sheet(f"headroom in {self.dtype}", ("", "tensor", "max |x|", ""), rows, tuple(notes), wide=("tensor",))

    def to_sheet(self) -> Sheet:
        """See `sheet`; the old name."""
        warn("Headroom.to_sheet() is sheet() now, as everything has it; the old name will go in a later release")
        return self.sheet()


def headroom(steps: Iterable[Step], dtype: str | torch.dtype, loss_scale: float = 1.0) -> Headroom:
    """See `Trace.headroom`."""
    name = dtype_name(dtype) if isinstance(dtype, (str, torch.dtype)) else shown(dtype)  # pyright: ignore[reportUnnecessaryIsInstance]
    if name not in FORMATS:
        raise InputError(f"headroom in {name!r}: want one of {', '.join(FORMATS)}")
    info = torch.finfo(getattr(torch, name))
    top, smallest = float(info.max), float(info.smallest_normal) * float(info.eps) / 2
    found: dict[tuple[Phase, str, str], TensorHeadroom] = {}
    for step in steps:
        for event in step.events:
            if event is step.start or not _counts(event):
                continue
            scaled = event.phase in ("backward", "gradients") and (loss_scale != 1 or step.scale not in (None, 1.0))
            largest = event.stats.largest * (loss_scale / (step.scale or 1.0) if scaled else 1.0)
            key = (event.phase, event.module, event.label)
            known = found.get(key)
            if known is None or largest > known.largest:
                lost = None if scaled else event.stats.under.get(name, 0.0)
                flush = smallest / largest if largest else 0.0
                found[key] = TensorHeadroom(*key, largest=largest, overflow=largest / top, flush=flush, lost=lost)
    return Headroom(name, loss_scale, tuple(found.values()))


def _counts(event: Event) -> bool:
    """True if a tensor would be held in the narrower dtype: not a buffer, not a mask of the dtype's lowest value."""
    stats = event.stats
    if event.role == "buffer" or event.is_difference or stats.size == 0:
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
