"""What a model carries of hfpatch now: each record held against the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hfpatch.given import FLAG, want
from hfpatch.model.walk import root_module, without_copy
from hfpatch.patching.kinds.states import State, Word, show
from hfpatch.patching.record import Record, logged, state_of
from hfpatch.report import Sheet, Shown


@dataclass(frozen=True)
class Standing:
    """One edit that was made to a model, and what has become of it.

    Attributes:
        path: Of the edited module.
        record: What was made of it.
        state: What is there now.
    """

    path: str
    record: Record
    state: State

    @property
    def place(self) -> str:
        """Return what was edited, for a sentence."""
        return f"{self.record.slot} of {self.path or 'the model itself'}"


@dataclass(frozen=True, repr=False)
class Status(Shown):
    """The patches a model carries now, by a look at the model. True if one of them is in force.

    Attributes:
        model: Name of the model's class.
        edits: Every edit that was made and not undone, each with what has become of it. Copies that PEFT keeps of an
            edited module count as that module.
    """

    model: str
    edits: tuple[Standing, ...]

    @property
    def patches(self) -> tuple[str, ...]:
        """Return the ids of the patches of which an edit is in force."""
        return tuple(dict.fromkeys(record.patch for _, record in self.records))

    @property
    def records(self) -> tuple[tuple[str, Record], ...]:
        """Return the edits that are in force, as (path, record)."""
        return tuple((e.path, e.record) for e in self.edits if e.state.in_force)

    @property
    def lapsed(self) -> tuple[Standing, ...]:
        """Return the edits that are not in force any more: gone, changed by somebody, or left half made."""
        return tuple(e for e in self.edits if not e.state.in_force)

    def __bool__(self) -> bool:
        return any(e.state.in_force for e in self.edits)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON: model, patches, edits (path, patch, slot, before, after, state, now)."""
        return {
            "model": self.model,
            "patches": list(self.patches),
            "edits": [
                {
                    "path": e.path,
                    "patch": e.record.patch,
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
        groups: dict[tuple[str, Word], list[Standing]] = {}
        for e in self.lapsed:
            groups.setdefault((e.record.patch, e.state.word), []).append(e)
        return tuple(_lapsed_line(patch, word, edits) for (patch, word), edits in groups.items())

    def sheet(self) -> Sheet:
        """Return it as a table, what is not in force any more first."""
        ids = dict.fromkeys(e.record.patch for e in sorted(self.edits, key=lambda e: e.state.in_force))
        rows: list[tuple[str, ...]] = []
        for patch in ids:
            mine = [e for e in self.edits if e.record.patch == patch]
            words = Counter(e.state.word for e in sorted(mine, key=lambda e: e.state.in_force))
            states = words.popitem()[0] if len(words) == 1 else ", ".join(f"{n} {word}" for word, n in words.items())
            rows.append((patch, str(len(mine)), states, mine[0].path or "the model itself"))
        notes = self.lapsed_lines() if rows else ("no patch of hfpatch is applied",)
        return Sheet(
            f"Status of {self.model}", ("patch", "edits", "state", "first at"), tuple(rows), notes, wide=("first at",)
        )


def _lapsed_line(patch: str, word: Word, edits: list[Standing]) -> str:
    first, count = edits[0], f"{len(edits)} of its edits are" if len(edits) > 1 else "one of its edits is"
    remedy = {
        "gone": "hfpatch.apply(model) sets it again where the model needs it, hfpatch.revert(model) clears the rest",
        "changed": f"hfpatch.revert(model, only={patch!r}) puts back what was there before the patch",
        "unfinished": "hfpatch.revert(model) cleans it",
    }
    return f"{patch}: {count} {word}: {first.place} is {first.state.now}: {remedy[word]}"


def status(model: object, *, compare: bool = False) -> Status:
    """Say which patches a model carries now, by a look at the model; also on a deepcopy or an unpickled model.

    Args:
        model: As for `hfpatch.apply`.
        compare: Compare the values of tensors that a patch drew, too, to tell those that were trained since.

    Raises:
        NotAModelError: `model` holds no torch module.
    """
    want("status", compare=(compare, FLAG))
    return status_of(root_module(model), None, compare=compare)


def status_of(root: nn.Module, application: str | None, *, compare: bool) -> Status:
    """Return the status of a model, or of one application's edits."""
    found: dict[tuple[str, str, str, Hashable], Standing] = {}
    for path, module, record in logged(root, application):
        key = (without_copy(path), record.application, record.patch, record.change.place)
        standing = Standing(path, record, state_of(root, module, record, compare=compare))
        if key not in found or not standing.state.in_force:  # of a module and its copies, the one that lost it
            found[key] = standing
    return Status(type(root).__name__, tuple(found.values()))
