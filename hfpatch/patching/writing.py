"""Edits carried out and undone, each with its record; those of a plan all or none."""

from __future__ import annotations

import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hfpatch.errors import ApplyError
from hfpatch.patching.decision import Decisions
from hfpatch.patching.edits import Edit
from hfpatch.patching.kinds.states import show
from hfpatch.patching.record import Record, add, advance, forget, logged, record_at, state_of

if TYPE_CHECKING:
    from torch import nn


def carry_out(root: nn.Module, made: Decisions) -> str:
    """Do what a plan says, all or nothing. Returns the id that its records bear.

    Raises:
        ApplyError: An edit failed; those before it were undone.
    """
    application = uuid.uuid4().hex
    try:
        for decision in made.of("applied"):
            for edit in decision.edits:
                _do(root, edit, application, decision.patch)
    except BaseException:
        for _, module, record in reversed(logged(root, application)):
            undo(root, module, record)
        raise
    return application


def _do(root: nn.Module, edit: Edit, application: str, patch: str) -> None:
    try:
        do(root, edit, application, patch)
    except Exception as error:
        raise ApplyError(
            f"{patch}: {edit.slot} of {edit.path or 'the model'!r} could not become {show(edit.after)} "
            f"({type(error).__name__}: {error}); nothing of it is applied"
        ) from error


def do(root: nn.Module, edit: Edit, application: str, patch: str) -> None:
    """Carry out one edit, the record first. An older record of the same place, no longer true, is undone before."""
    change, module = edit.change, edit.module
    older = record_at(module, change.place)
    if older is not None:
        undo(root, module, older)
    record = Record(application, patch, change, change.inverse(root, module), "writing")
    add(module, record)
    try:
        change.write(root, module, record.before)
    except BaseException:
        undo(root, module, record)  # it may have been written before it raised
        raise
    advance(module, record, "written")


def undo(root: nn.Module, module: nn.Module, record: Record) -> None:
    """Put back what was there before a record, and forget the record."""
    record = record_at(module, record.change.place) or record  # another's undo may have changed what it goes back to
    if record.phase == "written":
        record = advance(module, record, "undoing")
    back = record.change.abandon if record.phase == "writing" else record.change.restore
    back(root, module, record.before)
    forget(module, record)


@contextmanager
def lifted(root: nn.Module, log: Sequence[tuple[nn.Module, Record]]) -> Generator[None]:
    """The modules as they were before these records, those of them that are in force; afterwards as they are."""
    log = [(module, record) for module, record in log if state_of(root, module, record).in_force]
    begun: list[tuple[nn.Module, Record, list[Any]]] = []
    try:
        for module, record in reversed(log):
            held: list[Any] = []
            begun.append((module, record, held))
            record.change.lift(root, module, record.before, held)
        yield
    finally:
        for module, record, held in reversed(begun):
            record.change.lower(root, module, record.before, held)
