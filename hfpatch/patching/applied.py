"""The handle of an application: what was done, what has become of it, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn

from hfpatch.patching.arguments import Names
from hfpatch.patching.decision import Decisions, sheet
from hfpatch.patching.edits import Edit
from hfpatch.patching.record import Record, logged
from hfpatch.patching.status import Status, status_of
from hfpatch.patching.undo import one_at_a_time, undo_all
from hfpatch.report import Sheet, Shown

if TYPE_CHECKING:
    from hfpatch.patching.verifying.figures import Proof


@dataclass(frozen=True, repr=False)
class Applied(Shown):
    """What an apply did. Printing it shows a table; as a context manager it reverts at the end.

    Attributes:
        model: The patched module, the one that was passed.
        plan: What was planned, decision by decision.
        id: Names this application in the records the model carries.
    """

    model: nn.Module
    plan: Decisions
    id: str

    @property
    def edits(self) -> tuple[Edit, ...]:
        """What was changed, in order."""
        return self.plan.edits

    @property
    def new_parameters(self) -> tuple[nn.Parameter, ...]:
        """Parameters the patches added and the model still carries, for the optimizer."""
        return tuple(p for m, r in self.log() for p in r.change.added(self.model, m, r.before))

    def log(self) -> list[tuple[nn.Module, Record]]:
        """Return the records of it that the model carries: each edited module with its record, in the model's order."""
        return [(module, record) for _, module, record in logged(self.model, self.id)]

    def status(self) -> Status:
        """Return what has become of this application's edits, by a look at the model."""
        return status_of(self.model, self.id, compare=False)

    def revert(self) -> None:
        """Put back everything this application changed; a second call finds nothing to do.

        What somebody else set since stays as it is, and so do tensors that a patch drew and that were trained since;
        layers that a patch added go, trained or not. Each of these is said on stderr.

        Raises:
            RevertError: Some edits could not be undone (a compiled model was called meanwhile); all others were.
        """
        with one_at_a_time():
            undo_all(self.model, logged(self.model, self.id))

    def verify(self, batch: Mapping[str, Any], *, runs: Names = None) -> Proof:
        """Run this model on this batch, before and after, against float32 with the same weights.

        Edits that claim to compute the same are measured against the model without them. What changes the function (a
        projector drawn anew) is in place in every row, and what it did to the loss is said on its own. Where nothing
        is applied this compares dtypes, as `hfpatch.verify` does.

        Args:
            batch: As for `hfpatch.verify`.
            runs: As for `hfpatch.verify`, e.g. `["before", "after"]`.

        Returns:
            Loss, KL and top-1 for: as it was, patched, and the stock alternatives. Prints as a table.

        Raises:
            InputError: The batch does not run in float32, the model returns no logits, or there is no such row.
        """
        from hfpatch.patching.verifying.verify import prove

        return prove(self.model, self.plan, self.log(), batch, runs)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON: id, plan (`Plan.to_dict`), status (`Status.to_dict`, by a look at the model)."""
        return {"id": self.id, "plan": self.plan.to_dict(), "status": self.status().to_dict()}

    def sheet(self) -> Sheet:
        """As a table."""
        status = self.status()
        state = "Applied to" if status.edits or not self.edits else "Reverted on"
        return sheet(f"{state} {self.plan.model}", self.plan, lapsed=status.lapsed_lines() if status.edits else ())

    def __enter__(self) -> Applied:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.revert()
