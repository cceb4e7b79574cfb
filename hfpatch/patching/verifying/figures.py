"""The result of a verification."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from hfpatch.report import Sheet, Shown


@dataclass(frozen=True)
class Figures:
    """The figures of one way to run the model on one batch.

    Attributes:
        name: `before`, `after`, `as it is`, or a stock alternative.
        loss: The model's own loss, `model(**batch).loss`; None if it returns none.
        kl: Mean KL divergence KL(reference || this run), in nats per token.
        top1: Share of tokens (0 to 1) for which the most likely next token is the reference's.
        finite: True if every logit is finite.
        auxiliary: The auxiliary loss of experts, before its coefficient; None if the model returns none.
        seconds: Time of one forward pass in seconds, if the model runs as it is on a GPU; else None.
        memory: Extra peak GPU memory of this forward pass in bytes; None where `seconds` is.
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
        """Return the figures for JSON; non-finite numbers become None."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}


@dataclass(frozen=True)
class LossChange:
    """The effect on the loss of a patch that changes the function.

    Attributes:
        patch: Id of the patch.
        effect: Its effect on this model.
        before: The model's loss without this patch alone; None if the model returns none.
        after: The model's loss with it; None if the model returns none.
    """

    patch: str
    effect: str
    before: float | None
    after: float | None

    def __str__(self) -> str:
        if self.before is None or self.after is None:
            seen = "no loss to compare before and after"
        else:
            seen = f"loss {number(self.before)} before, {number(self.after)} after"
        return f"{self.patch} ({self.effect}): {seen}; it changes the function, so it is in place in every row"

    def to_dict(self) -> dict[str, Any]:
        """Return the losses for JSON; non-finite numbers become None."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}


@dataclass(frozen=True, repr=False)
class Proof(Shown):
    """A model run on a batch in several ways, compared with float32 with the same weights.

    Attributes:
        reference: The run in float32.
        rows: The other runs.
        notes: Sentences about the number of tokens, about what was not cast, and about runs that failed.
        changes: Patches that change the function, which are in place in every row.
        model: Name of the model's class, or of its checkpoint.
    """

    reference: Figures
    rows: tuple[Figures, ...]
    notes: tuple[str, ...]
    changes: tuple[LossChange, ...] = ()
    model: str = ""

    def __getitem__(self, name: str) -> Figures:
        """Return a row by name: `before`, `after`, `bfloat16 weights`, ...

        Raises:
            KeyError: There is no row of that name; the names are listed.
        """
        for row in (self.reference, *self.rows):
            if row.name == name:
                return row
        raise KeyError(f"no row {name!r}; there are: {', '.join(r.name for r in self.rows)}")

    def to_dict(self) -> dict[str, Any]:
        """Return model, reference, rows and notes, and `changes` if there are any, for JSON."""
        changes = {"changes": [c.to_dict() for c in self.changes]} if self.changes else {}
        return {
            "model": self.model,
            "reference": self.reference.to_dict(),
            "rows": [r.to_dict() for r in self.rows],
            "notes": list(self.notes),
            **changes,
        }

    def sheet(self) -> Sheet:
        """Return a table with a row per run."""
        found = (self.reference, *self.rows)
        timed = any(r.seconds is not None for r in found)
        columns = ("run", "loss", "KL to float32", "top-1", *(("step", "memory of a step") if timed else ()))
        rows = tuple((*_cells(r), *(_cost(r) if timed else ())) for r in found)
        return Sheet("Verified on this batch", columns, rows, (*map(str, self.changes), *self.notes))


def number(value: float | None) -> str:
    """Return a figure as text: three decimals, or two digits if it is small; `-` for None."""
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) >= 0.1 else f"{value:.1e}"


def _cells(row: Figures) -> tuple[str, ...]:
    return row.name, number(row.loss), number(row.kl), f"{row.top1:.2%}"


def _cost(row: Figures) -> tuple[str, str]:
    if row.seconds is None or row.memory is None:
        return "-", "-"
    return f"{row.seconds * 1e3:.1f} ms", f"{row.memory / 2**20:,.0f} MiB"
