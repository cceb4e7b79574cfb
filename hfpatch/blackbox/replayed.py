"""The result of replaying a bundle on a checkpoint, beside the recorded run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hfpatch.blackbox.bundle import Bundle
from hfpatch.blackbox.packing import plain
from hfpatch.blackbox.rerun import Rerun
from hfpatch.report import Sheet, Shown


@dataclass(frozen=True, repr=False)
class Replayed(Shown):
    """The result of running a bundle's batch in another model.

    Attributes:
        bundle: The recorded bundle.
        model: Name of the checkpoint.
        found: The result of the call here.
        patches: Ids of the patches that were applied for it.
        notes: Differences from the run, a sentence each.
        advice: Advice, a sentence each.
    """

    bundle: Bundle
    model: str
    found: Rerun
    patches: tuple[str, ...]
    notes: tuple[str, ...]
    advice: tuple[str, ...]

    @property
    def says(self) -> str:
        """Return the result in a sentence."""
        return self.found.says(self.bundle.step, float(self.bundle.about["event"]["scale"] or 1.0))

    @property
    def verdict(self) -> str:
        """Return a sentence on whether the recorded fault occurs here."""
        if self.bundle.reproduced(self.found):
            return "Reproduced: the same operation in the same module."
        if self.found.finding is not None:
            return "Not reproduced: there is a fault here, but not the recorded one."
        if self.bundle.finding is not None:
            return "Not reproduced: the recorded fault does not occur here."
        return "Nothing to reproduce: no fault was found in the run either."

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON: bundle, model, event, recorded, replayed, reproduced, patches, notes, advice."""
        recorded = self.bundle.about["replay"]
        again = self.found.finding.to_dict() if self.found.finding is not None else None
        return plain(
            {
                "bundle": str(self.bundle.path),
                "model": self.model,
                "event": self.bundle.event,
                "recorded": {k: recorded[k] for k in ("says", "finding", "exact", "loss", "norm")},
                "replayed": {"says": self.says, "finding": again, "loss": self.found.loss, "norm": self.found.norm},
                "reproduced": self.bundle.reproduced(self.found),
                "patches": self.patches,
                "notes": self.notes,
                "advice": self.advice,
            }
        )

    def sheet(self) -> Sheet:
        """Return a table: the recorded run beside the run here."""
        rows = (("in the run", self.bundle.says), ("here", self.says))
        title = f"{self.bundle.path.name} on {self.model}\n{self.bundle.event}"
        return Sheet(title, ("", ""), rows, (self.verdict, *self.notes, *self.advice), wide=("",))
