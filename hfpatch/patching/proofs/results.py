"""The proofs of a patch as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hfpatch.patching.proofs.proof import OUTCOMES, Proof
from hfpatch.report import Sheet, Shown


@dataclass(frozen=True, repr=False)
class Proofs(Shown):
    """What came of the repros of a patch, by architecture.

    Attributes:
        patch: Id of the patch.
        proofs: The proofs.
        left_out: The exceptions of the patch, architecture -> reason.
    """

    patch: str
    proofs: tuple[Proof, ...]
    left_out: Mapping[str, object]

    @property
    def counts(self) -> dict[str, int]:
        """Outcome -> number of proofs."""
        found = Counter(p.outcome for p in self.proofs)
        return {outcome: found[outcome] for outcome in OUTCOMES}

    def to_dict(self) -> dict[str, Any]:
        """Return patch, counts and proofs, for JSON."""
        return {"patch": self.patch, "counts": self.counts, "proofs": [p.to_dict() for p in self.proofs]}

    def sheet(self) -> Sheet:
        """Return a table: the outcomes, each with its number and architectures, and why the others are not proved."""
        rows = [(word, str(count), OUTCOMES[word], _names(self._of(word))) for word, count in self._counted()]
        rows += [(p.outcome, "", p.text, p.subject.name) for p in self.proofs if p.outcome in ("not cured", "untried")]
        if self.left_out:
            rows.append(("left out", str(len(self.left_out)), "named in but=", ", ".join(sorted(self.left_out))))
        wide = ("what came of it", "architectures")
        return Sheet(f"{self.patch}: {len(self.proofs)} proofs", ("outcome", "", *wide), tuple(rows), wide=wide)

    def _counted(self) -> Iterable[tuple[Any, int]]:
        return ((word, count) for word, count in self.counts.items() if count)

    def _of(self, outcome: str) -> list[str]:
        return [p.subject.name for p in self.proofs if p.outcome == outcome]


def _names(names: list[str]) -> str:
    return ", ".join(names)
