"""The hazards that were found, as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hfpatch.report import Sheet, Shown


@dataclass(frozen=True)
class Hazard:
    """One hazard.

    Attributes:
        id: Its code, for scripts: a key of `hfpatch.codes.HAZARDS`.
        certain: True if it is certain to happen; False if it may.
        reason: The cause, with what was found and where.
        change: What to change.
    """

    id: str
    certain: bool
    reason: str
    change: str

    @property
    def likelihood(self) -> str:
        """`certain` or `may happen`."""
        return "certain" if self.certain else "may happen"

    def __str__(self) -> str:
        return f"{self.id} ({self.likelihood}): {self.reason}. {self.change}"


@dataclass(frozen=True, repr=False)
class Hazards(Shown):
    """The result of `check`: true if there is a hazard; prints itself as a table.

    Attributes:
        model: Class of the model, and its mixed precision.
        hazards: The hazards found.
        remarks: Sentences on facts that are good to know, and on what was not checked.
    """

    model: str
    hazards: tuple[Hazard, ...]
    remarks: tuple[str, ...]

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the hazards."""
        return tuple(h.id for h in self.hazards)

    def __bool__(self) -> bool:
        return bool(self.hazards)

    def __len__(self) -> int:
        return len(self.hazards)

    def __iter__(self) -> Iterator[Hazard]:
        return iter(self.hazards)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: `{"model", "hazards": [{id, certain, reason, change}], "remarks"}`."""
        return {"model": self.model, "hazards": [asdict(h) for h in self.hazards], "remarks": list(self.remarks)}

    def sheet(self) -> Sheet:
        """Return the hazards as a table."""
        rows = tuple((f"{h.id}\n{h.likelihood}", f"{h.reason}.\n-> {h.change}.") for h in self.hazards)
        count = len(self.hazards) or "no"
        title = f"{self.model}: {count} hazard{'' if count == 1 else 's'}"
        wide = "why, and what to change"
        return Sheet(title, ("hazard", wide), rows, tuple(f"- {r}." for r in self.remarks), wide=(wide,))
