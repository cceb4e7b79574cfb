"""Writes and undoes edits together with their records; the edits of a plan all or none."""

from __future__ import annotations

import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hfpatch.errors import ApplyError
from hfpatch.patching.decision import Decision, Decisions
from hfpatch.patching.edits import Edit
from hfpatch.patching.kinds.states import show
from hfpatch.patching.record import Record, add, advance, forget, logged, record_at, state_of

if TYPE_CHECKING:
    from torch import nn


def carry_out(root: nn.Module, made: Decisions, there: Sequence[tuple[Edit, Any, Decision]] = ()) -> str:
    """Make the edits of a plan, all or nothing. Returns the application id in their records.

    Args:
        root: The whole object.
        made: The plan.
        there: Edits that the weights of a saved model have already, each with the data that undoing it needs, and its
            decision. They get records, and are not written.

    Raises:
        ApplyError: An edit failed; the edits before it were undone.
    """
    application = uuid.uuid4().hex
    begun: list[tuple[nn.Module, Record]] = []
    try:
        for edit, before, decision in there:
            record = Record(application, decision.patch, edit.change, before, origin=decision.origin)
            begun.append((edit.module, record))
            add(edit.module, record)
        for decision in made.of("applied"):
            for edit in decision.edits:
                _do(root, edit, application, decision)
    except BaseException:
        for module, record in begun:
            forget(module, record)  # these weights stay as they were saved
        for _, module, record in reversed(logged(root, application)):
            undo(root, module, record)
        raise
    return application


def _do(root: nn.Module, edit: Edit, application: str, decision: Decision) -> None:
    try:
        do(root, edit, application, decision)
    except Exception as error:
        raise ApplyError(
            f"{decision.title}: {edit.slot} of {edit.path or 'the model'!r} could not become {show(edit.after)} "
            f"({type(error).__name__}: {error}); the edits before it are undone, so apply changes nothing"
        ) from error


def do(root: nn.Module, edit: Edit, application: str, decision: Decision) -> None:
    """Make one edit, its record first. An older edit of the same place, which is no longer in force, is undone."""
    change, module = edit.change, edit.module
    older = record_at(module, change.place)
    if older is not None:
        undo(root, module, older)
    before = change.inverse(root, module)
    record = Record(application, decision.patch, change, before, "writing", decision.origin)
    add(module, record)
    try:
        change.write(root, module, record.before)
    except BaseException:
        undo(root, module, record)  # part of it may have been written
        raise
    advance(module, record, "written")


def undo(root: nn.Module, module: nn.Module, record: Record) -> None:
    """Undo the edit of a record, and drop the record."""
    record = record_at(module, record.change.place) or record  # undoing another edit may have changed its `before`
    if record.phase == "written":
        record = advance(module, record, "undoing")
    back = record.change.abandon if record.phase == "writing" else record.change.restore
    back(root, module, record.before)
    forget(module, record)


@contextmanager
def suspended(root: nn.Module, log: Sequence[tuple[nn.Module, Record]]) -> Generator[None]:
    """Suspend the edits of these records that are in force, and resume them at the end of the context."""
    log = [(module, record) for module, record in log if state_of(root, module, record).in_force]
    begun: list[tuple[nn.Module, Record, list[Any]]] = []
    try:
        for module, record in reversed(log):
            held: list[Any] = []
            begun.append((module, record, held))
            record.change.suspend(root, module, record.before, held)
        yield
    finally:
        for module, record, held in reversed(begun):
            record.change.resume(root, module, record.before, held)
