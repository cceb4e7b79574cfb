"""Records: what a module carries of the edits made to it, so that a copy of a model can be asked and reverted too.

A record is a claim, the model is the truth: `Kind.read` says what has become of an edit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn

RECORDS = "_hfpatch"
"""Key in a module's `__dict__` under which its records are kept while it is edited."""

Phase = Literal["writing", "written", "undoing"]
Word = Literal["here", "gone", "changed", "trained", "unfinished"]


class Missing(Enum):
    """Stands for "there was nothing"; an enum member stays itself through copies and pickles."""

    ABSENT = "absent"


ABSENT = Missing.ABSENT


def show(value: object) -> str:
    """Return a value of an edit as a table cell."""
    if value is ABSENT:
        return "-"
    if isinstance(value, (int, float, str, bool)):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return str(value) if type(value).__str__ is not object.__str__ else type(value).__name__


@dataclass(frozen=True)
class Record:
    """An undo-log entry: which patch of which application made an edit, and what undo needs.

    Attributes:
        kind: Name of the kind of edit.
        slot: What of the module is changed.
        before: The inverse: what the kind needs to put things back.
        after: The value asked for, comparable and picklable.
        phase: `written`; while the edit is being written or undone, and after an interruption of that, the other two.
    """

    application: str
    patch: str
    kind: str
    slot: str
    before: Any
    after: Any
    phase: Phase = "written"


@dataclass(frozen=True)
class State:
    """What has become of an edit.

    Attributes:
        word: `here`: as it was made. `gone`: what it made is not there any more. `changed`: somebody set something
            else. `trained`: a tensor has other values than it was given. `unfinished`: an interruption left it half
            made or half undone; the next revert cleans it.
        now: What is there instead, to complete "eps of ln_speech is ...".
    """

    word: Word
    now: str = ""

    @property
    def in_force(self) -> bool:
        """True if the patch does what it was applied for."""
        return self.word in ("here", "trained")


HERE = State("here")
UNFINISHED = State("unfinished", "half made or half undone")


def records_of(module: nn.Module) -> list[Record]:
    """Return the records a module carries, oldest first."""
    return module.__dict__.get(RECORDS, [])


def record_at(module: nn.Module, slot: str) -> Record | None:
    """Return the record of a slot; None where it was not edited."""
    return next((r for r in records_of(module) if r.slot == slot), None)


def logged(root: nn.Module, application: str | None = None) -> list[tuple[str, nn.Module, Record]]:
    """Return every record in a model, or those of one application, each with its module and that one's path."""
    return [
        (path, module, record)
        for path, module in root.named_modules()
        for record in records_of(module)
        if application is None or record.application == application
    ]


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
