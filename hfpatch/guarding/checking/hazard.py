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
        hazards: The hazards found, those of a step that was run first.
        remarks: Sentences on facts that are good to know.
        measured: Facts that were measured by running the model.
        read: Facts that were read from modules, code and arguments; nothing was run for them.
        not_looked_at: Facts that were not looked at, each with the reason.
    """

    model: str
    hazards: tuple[Hazard, ...]
    remarks: tuple[str, ...]
    measured: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    not_looked_at: tuple[str, ...] = ()

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
        """Return plain values for JSON.

        `{"model", "hazards": [{id, certain, reason, change}], "remarks", "measured", "read", "not_looked_at"}`.
        """
        return {
            "model": self.model,
            "hazards": [asdict(h) for h in self.hazards],
            **{name: list(getattr(self, name)) for name in ("remarks", "measured", "read", "not_looked_at")},
        }

    def sheet(self) -> Sheet:
        """Return the hazards as a table."""
        rows = tuple((f"{h.id}\n{h.likelihood}", f"{h.reason}.\n-> {h.change}.") for h in self.hazards)
        count = len(self.hazards) or "no"
        title = f"{self.model}: {count} hazard{'' if count == 1 else 's'}"
        wide = "why, and what to change"
        looked = {"measured": self.measured, "read": self.read, "not looked at": self.not_looked_at}
        notes = [f"{word}: {'; '.join(lines)}." for word, lines in looked.items() if lines]
        return Sheet(title, ("hazard", wide), rows, (*notes, *(f"- {r}." for r in self.remarks)), wide=(wide,))
