"""Records of edits, carried by the edited modules, so a copy of a model can report and revert its edits too.

The model may have changed since a record was written: `state_of` compares the two.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from hfpatch.patching.kinds.base import Change
from hfpatch.patching.kinds.states import UNFINISHED, State

if TYPE_CHECKING:
    from torch import nn

RECORDS = "_hfpatch"
"""Key of an edited module's `__dict__` that holds its records."""

Phase = Literal["writing", "written", "undoing"]


@dataclass(frozen=True)
class Record:
    """An undo-log entry: one edit, the patch that made it, and the data that undoing it needs.

    Attributes:
        application: Id of the call of apply that made the edit.
        patch: Id of the patch.
        change: The change to the module; comparable and picklable.
        before: The data that the change needs to restore the module.
        origin: As in `Entry.origin`, when the edit was made.
        phase: `writing` or `undoing` during these, and after an interruption of one; otherwise `written`.
    """

    application: str
    patch: str
    change: Change
    before: Any
    phase: Phase = "written"
    origin: str = ""

    @property
    def title(self) -> str:
        """Id and origin of the patch."""
        return f"{self.patch} ({self.origin})" if self.origin else self.patch

    @property
    def slot(self) -> str:
        """Name of the changed property, for tables and messages."""
        return self.change.slot

    @property
    def after(self) -> Any:
        """The new value, for tables and messages."""
        return self.change.after


def records_of(module: nn.Module) -> list[Record]:
    """Return the records of a module, oldest first."""
    return module.__dict__.get(RECORDS, [])


def record_at(module: nn.Module, place: Hashable) -> Record | None:
    """Return the record of a place in a module; None if it was not edited."""
    return next((r for r in records_of(module) if r.change.place == place), None)


def logged(root: nn.Module, application: str | None = None) -> list[tuple[str, nn.Module, Record]]:
    """Return (path, module, record) for every record in a model, or in one application, in module order."""
    return [
        (path, module, record)
        for path, module in root.named_modules()
        for record in records_of(module)
        if application is None or record.application == application
    ]


def state_of(root: nn.Module, module: nn.Module, record: Record, *, compare: bool = False) -> State:
    """Return the present state of an edit in the model; with `compare`, tensor values are compared too."""
    if record.phase != "written":
        return UNFINISHED
    look = record.change.compare if compare else record.change.read
    return look(root, module, record.before)


def add(module: nn.Module, record: Record) -> None:
    """Add a record to a module."""
    _keep(module, [*records_of(module), record])


def advance(module: nn.Module, record: Record, phase: Phase) -> Record:
    """Set the phase of a record. Returns the new record, which replaces it on the module."""
    return exchange(module, record, replace(record, phase=phase))


def exchange(module: nn.Module, record: Record, other: Record) -> Record:
    """Replace a record of a module with another. Returns the other."""
    _keep(module, [other if r is record else r for r in records_of(module)])
    return other


def forget(module: nn.Module, record: Record) -> None:
    """Drop a record from a module, and leave the edit as it is."""
    _keep(module, [r for r in records_of(module) if r is not record])


def _keep(module: nn.Module, records: Iterable[Record]) -> None:
    kept = list(records)
    if kept:
        module.__dict__[RECORDS] = kept
    else:
        module.__dict__.pop(RECORDS, None)
