"""Records: what a module carries of the edits made to it, so that a copy of a model can be asked and reverted too.

A record is a claim, the model is the truth: `state_of` says what has become of an edit.
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
"""Key in a module's `__dict__` under which its records are kept while it is edited."""

Phase = Literal["writing", "written", "undoing"]


@dataclass(frozen=True)
class Record:
    """An undo-log entry: which patch of which application made an edit, and what undo needs.

    Attributes:
        change: What was done to the module; comparable and picklable.
        before: The inverse: what the change needs to put things back.
        phase: `written`; while the edit is being written or undone, and after an interruption of that, the other two.
    """

    application: str
    patch: str
    change: Change
    before: Any
    phase: Phase = "written"

    @property
    def slot(self) -> str:
        """Name of what is changed, for tables and sentences."""
        return self.change.slot

    @property
    def after(self) -> Any:
        """The value asked for, for tables and sentences."""
        return self.change.after


def records_of(module: nn.Module) -> list[Record]:
    """Return the records a module carries, oldest first."""
    return module.__dict__.get(RECORDS, [])


def record_at(module: nn.Module, place: Hashable) -> Record | None:
    """Return the record of a place; None where it was not edited."""
    return next((r for r in records_of(module) if r.change.place == place), None)


def logged(root: nn.Module, application: str | None = None) -> list[tuple[str, nn.Module, Record]]:
    """Return every record in a model, or those of one application, each with its module and that one's path."""
    return [
        (path, module, record)
        for path, module in root.named_modules()
        for record in records_of(module)
        if application is None or record.application == application
    ]


def state_of(root: nn.Module, module: nn.Module, record: Record, *, compare: bool = False) -> State:
    """Return what has become of an edit, by a look at the model; with `compare`, at the values of tensors too."""
    if record.phase != "written":
        return UNFINISHED
    look = record.change.compare if compare else record.change.read
    return look(root, module, record.before)


def add(module: nn.Module, record: Record) -> None:
    """Let a module carry one more record."""
    _keep(module, [*records_of(module), record])


def advance(module: nn.Module, record: Record, phase: Phase) -> Record:
    """Put a record into another phase. Returns the record the module carries then."""
    return exchange(module, record, replace(record, phase=phase))


def exchange(module: nn.Module, record: Record, other: Record) -> Record:
    """Let a module carry another record in the place of one. Returns the other."""
    _keep(module, [other if r is record else r for r in records_of(module)])
    return other


def forget(module: nn.Module, record: Record) -> None:
    """Drop a record and leave what it is about as it is."""
    _keep(module, [r for r in records_of(module) if r is not record])


def _keep(module: nn.Module, records: Iterable[Record]) -> None:
    kept = list(records)
    if kept:
        module.__dict__[RECORDS] = kept
    else:
        module.__dict__.pop(RECORDS, None)
