"""The handle that `apply` returns: the plan, the present state of its edits, and revert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hfpatch.given import PATH, torch_optimizer, want
from hfpatch.patching.arguments import Names
from hfpatch.patching.decision import Decisions, sheet
from hfpatch.patching.edits import Edit
from hfpatch.patching.record import Record, logged
from hfpatch.patching.status import Status, status_of
from hfpatch.patching.undo import one_at_a_time, undo_all
from hfpatch.report import Sheet, Shown, say

if TYPE_CHECKING:
    from hfpatch.patching.verifying.figures import Proof


@dataclass(frozen=True, repr=False)
class Applied(Shown):
    """The result of `hfpatch.apply`. Printing it shows a table; as a context manager it reverts at the end.

    Attributes:
        model: The patched module.
        plan: The plan that was applied, decision by decision.
        id: Id of this application in the records that the model carries.
    """

    model: nn.Module
    plan: Decisions
    id: str
    _joined: list[tuple[torch.optim.Optimizer, tuple[nn.Parameter, ...]]] = field(
        default_factory=list[Any], init=False, compare=False
    )

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The edits that were made, in the order of the plan."""
        return self.plan.edits

    @property
    def new_parameters(self) -> tuple[nn.Parameter, ...]:
        """Parameters that the patches added and the model still has; `add_to` gives them to an optimizer."""
        return tuple(p for m, r in self.log() for p in r.change.added(self.model, m, r.before))

    def log(self) -> list[tuple[nn.Module, Record]]:
        """Return (module, record) for each of its records that the model still carries, in module order."""
        return [(module, record) for _, module, record in logged(self.model, self.id)]

    def status(self) -> Status:
        """Return the present state of this application's edits in the model."""
        return status_of(self.model, self.id, compare=False)

    def add_to(self, optimizer: Any) -> tuple[nn.Parameter, ...]:
        """Add the parameters that the patches added to an optimizer that was created before.

            fix = hfpatch.apply(model, include=["lora-target-expansion"])
            fix.add_to(optimizer)

        Each joins the parameter group of its siblings: those of the same adapter and half (`lora_A`, `lora_B`, DoRA's
        magnitudes, biases), the nearest by path if they are in several groups. So it gets their learning rate, weight
        decay and schedule, also where these differ by half (LoRA+) or by layer; its state begins at its first step. In
        its group it has the place at which an optimizer that is created anew has it. Parameters that the optimizer
        holds are not added again, and frozen ones are left out. What was added is reported on stderr.

        `revert()` takes them out again, with their state; `hfpatch.revert(model)` knows no optimizer.

        Args:
            optimizer: The torch optimizer that trains this model, or one that accelerate prepared.

        Returns:
            The parameters that were added.

        Raises:
            InputError: It is no torch optimizer, or that of another model; it holds no sibling of a parameter that
                trains, or the nearest ones in several groups; it is LBFGS or Adagrad, which take no new parameters.
                Nothing was added.
        """
        from hfpatch.lora.groups import described, join, joining

        inner = torch_optimizer("add_to", optimizer)
        with one_at_a_time():
            new = self.new_parameters
            found = joining(self.model, inner, new)
            added = tuple(j.parameter for j in found)
            if found:
                self._joined.append((inner, added))
                join(self.model, inner, found)
        name = type(inner).__name__
        if found:
            say([f"hfpatch: {len(found)} parameters added to {name}: {described(inner, found)}"])
        elif new:
            say([f"hfpatch: nothing to add to {name}: the {len(new)} new parameters are in it already, or frozen"])
        else:
            say([f"hfpatch: nothing to add to {name}: the model has no parameters that these patches added"])
        return added

    def revert(self) -> None:
        """Undo the edits of this application. A second call finds nothing to do.

        Values that were set by other code since stay, and so do tensors that a patch initialised and that were trained
        since. Layers that a patch added are removed, trained or not; what `add_to` added to optimizers leaves them, if
        the model no longer has or trains it. Each of these is reported on stderr.

        Raises:
            RevertError: Some edits could not be undone, e.g. because a compiled model was called. The others are not
                affected.
        """
        with one_at_a_time():
            try:
                undo_all(self.model, logged(self.model, self.id))
            finally:
                self._leave_optimizers()

    def _leave_optimizers(self) -> None:
        from hfpatch.lora.groups import leave

        for optimizer, added in self._joined:
            if count := leave(self.model, optimizer, added):
                say([f"hfpatch: {count} parameters taken out of {type(optimizer).__name__}, with their state"])

    def save(self, directory: str | PathLike[str]) -> Path:
        """Write `hfpatch.json` beside a saved checkpoint: what whoever loads it has to apply again, to be replayed.

        `hfpatch.load(directory)` or `hfpatch.apply(model, manifest=directory)` replays it, on this model only. It names
        every patch that the model carries, those of other applications too, their options and edits, the releases that
        run here, and what tells the model from others; no path and no value of the machine. The tensors that a patch
        set, as they are and as they were, go into `hfpatch-tensors/` beside it. Save the model first.

        Atomic: a reader, also after a SIGKILL, sees the manifest before or this one.

        Args:
            directory: The directory of the checkpoint.

        Returns:
            The path of `hfpatch.json`.

        Raises:
            InputError: There is no such directory or it cannot be written, no patch is applied, an edit is no longer in
                force, a tensor is sharded, or a patch's own function cannot be told from others.
        """
        want("applied.save", directory=(directory, PATH))
        from hfpatch.patching.manifest.saving import save

        with one_at_a_time():
            return save(self.model, self.plan, Path(directory))

    def verify(self, batch: Mapping[str, Any], *, runs: Names = None) -> Proof:
        """Run this model on a batch, without and with the patches, and compare with float32 with the same weights.

        Exact and equivalent edits are compared with the model without them. Patches that change the function (e.g. a
        re-initialised projector) are in place in every row, and their effect on the loss is reported separately. If
        nothing is applied, this compares dtypes, as `hfpatch.verify` does.

        Args:
            batch: As for `hfpatch.verify`.
            runs: As for `hfpatch.verify`, e.g. `["before", "after"]`.

        Returns:
            Loss, KL divergence and top-1 agreement without the patches, with them, and of the stock alternatives.
            Prints as a table.

        Raises:
            InputError: The batch does not run in float32, the model returns no logits, or there is no such row.
        """
        from hfpatch.patching.verifying.verify import prove

        return prove(self.model, self.plan, self.log(), batch, runs)

    def to_dict(self) -> dict[str, Any]:
        """Return id, plan (`Plan.to_dict`) and present status (`Status.to_dict`), for JSON."""
        return {"id": self.id, "plan": self.plan.to_dict(), "status": self.status().to_dict()}

    def sheet(self) -> Sheet:
        """Return the plan as a table, with the edits that are no longer in force."""
        status = self.status()
        state = "Applied to" if status.edits or not self.edits else "Reverted on"
        return sheet(f"{state} {self.plan.model}", self.plan, lapsed=status.lapsed_lines() if status.edits else ())

    def __enter__(self) -> Applied:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.revert()
