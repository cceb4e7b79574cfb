"""What a verification found, as values that print themselves."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from hfpatch.report import Sheet, Shown


@dataclass(frozen=True)
class Figures:
    """One way to run the model, on one batch.

    Attributes:
        name: `before`, `after`, `as it is`, or a stock alternative.
        loss: The model's own, `model(**batch).loss`; None where it gives none.
        kl: Mean KL divergence from the reference to this, in nats a token.
        top1: Share of tokens whose most likely token is the reference's.
        finite: Whether every logit is finite.
        auxiliary: What experts add to the loss, before its coefficient; None where the model shows none.
        seconds: Of one forward, on a GPU, of a model that runs as it is; else None.
        memory: Bytes on the GPU that this forward needed beside what was there; else None.
    """

    name: str
    loss: float | None
    kl: float
    top1: float
    finite: bool
    auxiliary: float | None = None
    seconds: float | None = None
    memory: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON; what is not finite is null."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}


@dataclass(frozen=True)
class LossChange:
    """A patch that changes what the model computes, and what that did to the loss.

    Attributes:
        patch: Its id.
        effect: On this model.
        before: The model's loss with this patch alone taken off; None where the model gives none.
        after: The model's loss with it.
    """

    patch: str
    effect: str
    before: float | None
    after: float | None

    def __str__(self) -> str:
        if self.before is None or self.after is None:
            seen = "no loss to show before and after"
        else:
            seen = f"loss {number(self.before)} before, {number(self.after)} after"
        return f"{self.patch} ({self.effect}): {seen}; it changes what the model computes, so every row has it"

    def to_dict(self) -> dict[str, Any]:
        """As JSON; what is not finite is null."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}


@dataclass(frozen=True, repr=False)
class Proof(Shown):
    """A model on a batch, run in several ways, against float32 with the same weights.

    Attributes:
        reference: The run in float32.
        rows: The others.
        notes: What was counted, what stayed as it was, what could not be run.
        changes: Patches that change what the model computes; they are in place in every row.
        model: Name of its class, or of its checkpoint.
    """

    reference: Figures
    rows: tuple[Figures, ...]
    notes: tuple[str, ...]
    changes: tuple[LossChange, ...] = ()
    model: str = ""

    def __getitem__(self, name: str) -> Figures:
        """A row by name: `before`, `after`, `bfloat16 weights`, ..."""
        for row in (self.reference, *self.rows):
            if row.name == name:
                return row
        raise KeyError(f"no row {name!r}; there are: {', '.join(r.name for r in self.rows)}")

    def to_dict(self) -> dict[str, Any]:
        """As JSON: model, reference, rows, notes; `changes` only where there are some."""
        changes = {"changes": [c.to_dict() for c in self.changes]} if self.changes else {}
        return {
            "model": self.model,
            "reference": self.reference.to_dict(),
            "rows": [r.to_dict() for r in self.rows],
            "notes": list(self.notes),
            **changes,
        }

    def sheet(self) -> Sheet:
        """As a table."""
        found = (self.reference, *self.rows)
        timed = any(r.seconds is not None for r in found)
        columns = ("run", "loss", "KL to float32", "top-1", *(("step", "memory of a step") if timed else ()))
        rows = tuple((*_cells(r), *(_cost(r) if timed else ())) for r in found)
        return Sheet("Verified on this batch", columns, rows, (*map(str, self.changes), *self.notes))


def number(value: float | None) -> str:
    """A figure in a table: three decimals, or two digits where it is small; `-` for none."""
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) >= 0.1 else f"{value:.1e}"


def _cells(row: Figures) -> tuple[str, ...]:
    return row.name, number(row.loss), number(row.kl), f"{row.top1:.2%}"


def _cost(row: Figures) -> tuple[str, str]:
    if row.seconds is None or row.memory is None:
        return "-", "-"
    return f"{row.seconds * 1e3:.1f} ms", f"{row.memory / 2**20:,.0f} MiB"
