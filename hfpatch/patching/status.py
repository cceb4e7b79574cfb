"""The patches that a model carries now: each record compared with the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hfpatch.given import FLAG, want
from hfpatch.model.walk import check_not_traced, root_module, without_copy
from hfpatch.patching.kinds.states import State, Word, show
from hfpatch.patching.record import Record, logged, state_of
from hfpatch.report import Sheet, Shown


@dataclass(frozen=True)
class EditStatus:
    """One edit that was made to a model, and its present state.

    Attributes:
        path: Path of the edited module.
        record: The record of the edit.
        state: Its present state.
    """

    path: str
    record: Record
    state: State

    @property
    def place(self) -> str:
        """Slot and path of the edit, for a message."""
        return f"{self.record.slot} of {self.path or 'the model itself'}"


@dataclass(frozen=True, repr=False)
class Status(Shown):
    """The patches that a model carries now, as the model shows. True if an edit is in force.

    Attributes:
        model: Name of the model's class.
        edits: Every edit that was made and not undone, with its present state. Copies that PEFT keeps of an edited
            module count as that module.
    """

    model: str
    edits: tuple[EditStatus, ...]

    @property
    def patches(self) -> tuple[str, ...]:
        """Ids of the patches with an edit in force."""
        return tuple(dict.fromkeys(record.patch for _, record in self.records))

    @property
    def records(self) -> tuple[tuple[str, Record], ...]:
        """The edits that are in force, as (path, record)."""
        return tuple((e.path, e.record) for e in self.edits if e.state.in_force)

    @property
    def lapsed(self) -> tuple[EditStatus, ...]:
        """The edits that are no longer in force: gone, changed by other code, or unfinished."""
        return tuple(e for e in self.edits if not e.state.in_force)

    def __bool__(self) -> bool:
        return any(e.state.in_force for e in self.edits)

    def to_dict(self) -> dict[str, Any]:
        """Return model, patches and edits (path, patch, origin, slot, before, after, state, now), for JSON."""
        return {
            "model": self.model,
            "patches": list(self.patches),
            "edits": [
                {
                    "path": e.path,
                    "patch": e.record.patch,
                    "origin": e.record.origin,
                    "slot": e.record.slot,
                    "before": show(e.record.before),
                    "after": show(e.record.after),
                    "state": e.state.word,
                    "now": e.state.now,
                }
                for e in self.edits
            ],
        }

    def lapsed_lines(self) -> tuple[str, ...]:
        """Return a sentence for each patch and state of edits that are not in force."""
        groups: dict[tuple[str, Word], list[EditStatus]] = {}
        for e in self.lapsed:
            groups.setdefault((e.record.patch, e.state.word), []).append(e)
        return tuple(_lapsed_line(patch, word, edits) for (patch, word), edits in groups.items())

    def sheet(self) -> Sheet:
        """Return a table of the patches; those with edits no longer in force come first."""
        titles = dict.fromkeys(e.record.title for e in sorted(self.edits, key=lambda e: e.state.in_force))
        rows: list[tuple[str, ...]] = []
        for title in titles:
            mine = [e for e in self.edits if e.record.title == title]
            words = Counter(e.state.word for e in sorted(mine, key=lambda e: e.state.in_force))
            states = words.popitem()[0] if len(words) == 1 else ", ".join(f"{n} {word}" for word, n in words.items())
            rows.append((title, str(len(mine)), states, mine[0].path or "the model itself"))
        notes = self.lapsed_lines() if rows else ("no patch of hfpatch is applied",)
        return Sheet(
            f"Status of {self.model}", ("patch", "edits", "state", "first at"), tuple(rows), notes, wide=("first at",)
        )


def _lapsed_line(patch: str, word: Word, edits: list[EditStatus]) -> str:
    first, count = edits[0], f"{len(edits)} of its edits are" if len(edits) > 1 else "one of its edits is"
    remedy = {
        "gone": "hfpatch.apply(model) makes it again if the model needs it, hfpatch.revert(model) undoes the rest",
        "changed": f"hfpatch.revert(model, only={patch!r}) restores the value before the patch",
        "unfinished": "hfpatch.revert(model) undoes it",
    }
    return f"{patch}: {count} {word}: {first.place} is {first.state.now}: {remedy[word]}"


def status(model: object, *, compare: bool = False) -> Status:
    """Return the patches that a model carries now, as the model shows; also for a deepcopy or an unpickled model.

    Args:
        model: As for `hfpatch.apply`.
        compare: Also compare the values of tensors that a patch initialised, to find those that were trained since.

    Raises:
        NotAModelError: `model` holds no torch module.
    """
    want("status", compare=(compare, FLAG))
    found = status_of(root_module(model), None, compare=compare)
    if not found.edits:
        check_not_traced(root_module(model))
    return found


def status_of(root: nn.Module, application: str | None, *, compare: bool) -> Status:
    """Return the status of a model, or of one application's edits."""
    found: dict[tuple[str, str, str, Hashable], EditStatus] = {}
    for path, module, record in logged(root, application):
        key = (without_copy(path), record.application, record.patch, record.change.place)
        edit = EditStatus(path, record, state_of(root, module, record, compare=compare))
        if key not in found or not edit.state.in_force:  # of a module and its copies, the one that lost the edit
            found[key] = edit
    return Status(type(root).__name__, tuple(found.values()))
