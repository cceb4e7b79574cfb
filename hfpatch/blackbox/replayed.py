"""A bundle that was replayed with a checkpoint, beside what the run recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hfpatch.blackbox.bundle import Bundle
from hfpatch.blackbox.packing import plain
from hfpatch.blackbox.rerun import Rerun
from hfpatch.report import Sheet, Shown


@dataclass(frozen=True, repr=False)
class Replayed(Shown):
    """What came of a bundle's batch in another model.

    Attributes:
        bundle: What was recorded.
        model: Name of the checkpoint.
        found: What the call did here.
        patches: Ids of the patches that were applied for it.
        notes: What is not as it was in the run, a sentence each.
        advice: What to try, a sentence each.
    """

    bundle: Bundle
    model: str
    found: Rerun
    patches: tuple[str, ...]
    notes: tuple[str, ...]
    advice: tuple[str, ...]

    @property
    def says(self) -> str:
        """Return what came of it, in a sentence."""
        return self.found.says(self.bundle.step, float(self.bundle.about["event"]["scale"] or 1.0))

    @property
    def verdict(self) -> str:
        """Return whether the fault of the run shows here, in a sentence."""
        if self.bundle.reproduced(self.found):
            return "Reproduced: the same operation of the same module."
        if self.found.finding is not None:
            return "Something goes wrong here, but not what the bundle recorded."
        if self.bundle.finding is not None:
            return "Not reproduced: what the bundle recorded does not happen here."
        return "Nothing to reproduce: no operation was found to go wrong in the run either."

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
        """Return what happened in the run beside what happened here."""
        rows = (("in the run", self.bundle.says), ("here", self.says))
        title = f"{self.bundle.path.name} with {self.model}\n{self.bundle.event}"
        return Sheet(title, ("", ""), rows, (self.verdict, *self.notes, *self.advice), wide=("",))
