"""A hazard, and all that were found, as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hfpatch.report import Sheet


@dataclass(frozen=True)
class Hazard:
    """One thing that goes wrong.

    Attributes:
        id: Short name, for scripts.
        certain: It will; else it may.
        reason: Why, with what was found and where.
        change: What to change.
    """

    id: str
    certain: bool
    reason: str
    change: str

    @property
    def likelihood(self) -> str:
        """In words."""
        return "certain" if self.certain else "may happen"

    def __str__(self) -> str:
        return f"{self.id} ({self.likelihood}): {self.reason}. {self.change}"


@dataclass(frozen=True)
class Hazards:
    """What `check` found; true if that is anything, and it prints itself as a table.

    Attributes:
        model: What was looked at, in words.
        hazards: In the order in which they would be met.
        remarks: Sentences: what is not wrong but good to know.
        measured: What was measured by running the model.
        read: What was read from its modules, its code and the arguments, and not run.
        not_looked_at: What was not looked at, each with the reason.
    """

    model: str
    hazards: tuple[Hazard, ...]
    remarks: tuple[str, ...]
    measured: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    not_looked_at: tuple[str, ...] = ()

    @property
    def ids(self) -> tuple[str, ...]:
        """Of the hazards."""
        return tuple(h.id for h in self.hazards)

    def __bool__(self) -> bool:
        return bool(self.hazards)

    def __len__(self) -> int:
        return len(self.hazards)

    def __iter__(self) -> Iterator[Hazard]:
        return iter(self.hazards)

    def to_dict(self) -> dict[str, Any]:
        """As JSON: `{"model", "hazards": [{id, certain, reason, change}], "remarks", "measured", "read",
        "not_looked_at"}`.
        """
        return {
            "model": self.model,
            "hazards": [asdict(h) for h in self.hazards],
            **{name: list(getattr(self, name)) for name in ("remarks", "measured", "read", "not_looked_at")},
        }

    def sheet(self) -> Sheet:
        """As a table."""
        rows = tuple((f"{h.id}\n{h.likelihood}", f"{h.reason}.\n-> {h.change}.") for h in self.hazards)
        count = len(self.hazards) or "no"
        title = f"{self.model}: {count} hazard{'' if count == 1 else 's'}"
        wide = "why, and what to change"
        looked = {"measured": self.measured, "read": self.read, "not looked at": self.not_looked_at}
        notes = [f"{word}: {'; '.join(lines)}." for word, lines in looked.items() if lines]
        return Sheet(title, ("hazard", wide), rows, (*notes, *(f"- {r}." for r in self.remarks)), wide=(wide,))

    def __str__(self) -> str:
        return self.sheet().to_text()

    def _repr_html_(self) -> str:
        return self.sheet().to_html()
