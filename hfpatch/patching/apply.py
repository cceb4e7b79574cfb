"""Plan -> edits with their records, all or nothing; and the handle that takes them back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn

from hfpatch.errors import RefusedError
from hfpatch.given import FLAG, want
from hfpatch.model.walk import root_module
from hfpatch.patching.announce import announcement
from hfpatch.patching.arguments import Names, names
from hfpatch.patching.decision import Plan, sheet
from hfpatch.patching.edits import Edit
from hfpatch.patching.plan import plan
from hfpatch.patching.record import Record, logged
from hfpatch.patching.status import Status, status_of
from hfpatch.patching.undo import one_at_a_time, undo_all
from hfpatch.patching.writing import carry_out
from hfpatch.report import Sheet, say

if TYPE_CHECKING:
    import torch

    from hfpatch.patching.verifying.figures import Proof


@dataclass(frozen=True)
class Applied:
    """What an apply did. Printing it shows a table; as a context manager it reverts at the end.

    Attributes:
        model: The patched module, the one that was passed.
        plan: What was planned, decision by decision.
        id: Names this application in the records the model carries.
    """

    model: nn.Module
    plan: Plan
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

    def sheet(self) -> Sheet:
        """As a table."""
        status = self.status()
        state = "Applied to" if status.edits or not self.edits else "Reverted on"
        return sheet(f"{state} {self.plan.model}", self.plan, lapsed=status.lapsed_lines() if status.edits else ())

    def __str__(self) -> str:
        return self.sheet().to_text()

    def _repr_html_(self) -> str:
        return self.sheet().to_html()

    def __enter__(self) -> Applied:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.revert()


def apply(
    model: object,
    *,
    verbose: bool = True,
    only: Names = None,
    include: Names = None,
    exclude: Names = None,
    added_modules: Any = None,
    compute_dtype: str | torch.dtype | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Applied:
    """Patch a loaded model in place.

    Without names it runs the patches whose condition holds for this model and whose effect is exact,
    equivalent or preparing; it adds no parameters and leaves alone what trained weights compute. What
    else there is stands in the plan, each with its reason and, if opt-in, the line to type.

    Args:
        model: A module, however wrapped, or an object whose `.model` is one (a Trainer).
        verbose: Say on stderr (rank 0) what was applied where, and what else is suggested.
        only: As for `hfpatch.plan`, like all that follow.
        include: As for `hfpatch.plan`.
        exclude: As for `hfpatch.plan`.
        added_modules: As for `hfpatch.plan`.
        compute_dtype: As for `hfpatch.plan`.
        options: As for `hfpatch.plan`.

    Returns:
        A handle: `.plan`, `.edits`, `.verify(batch)`, `.revert()`; also a context manager.

    Raises:
        ApplyError: An edit failed; those before it were undone.
        HfpatchError: As `hfpatch.plan`; nothing was changed.
    """
    want("apply", verbose=(verbose, FLAG))
    with one_at_a_time():
        made = plan(
            model,
            only=only,
            include=include,
            exclude=exclude,
            added_modules=added_modules,
            compute_dtype=compute_dtype,
            options=options,
        )
        check_asked(made, only)
        root = root_module(model)
        applied = Applied(root, made, carry_out(root, made))
    if verbose:
        say(announcement(applied.plan))
    return applied


def check_asked(made: Plan, only: Names) -> None:
    """Raise if a patch that was named by its id is refused; one that only a glob names may be.

    Raises:
        RefusedError: With the reason.
    """
    for patch_id in names(only):
        mine = [d for d in made.decisions if d.patch == patch_id]
        if mine and all(d.decided == "refused" for d in mine):
            raise RefusedError(f"{patch_id} was asked for and is refused: {'; '.join(d.reason for d in mine)}")
