"""Reverts patches, with the handle or without it. An edit that cannot be undone does not keep others from it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator

import torch
from torch import nn

from hfpatch.errors import RevertError
from hfpatch.model.source import REJECTIONS
from hfpatch.model.survey import Survey
from hfpatch.model.walk import check_not_traced, root_module
from hfpatch.patching.arguments import Names, ids, names
from hfpatch.patching.kinds.states import UNFINISHED, show
from hfpatch.patching.preconditions.compiled import compiled_already
from hfpatch.patching.record import Record, advance, forget, logged, record_at, state_of
from hfpatch.patching.writing import undo
from hfpatch.process_lock import ProcessLock
from hfpatch.report import say

_lock = ProcessLock()
"""One apply or revert at a time: two at once on one model would write the same edits twice. Not kept on the model,
which may be copied and saved."""


@contextlib.contextmanager
def one_at_a_time() -> Generator[None]:
    """Hold the lock while a model is planned and patched, or reverted.

    Inference mode is off inside: autograd takes no tensor that was made in it.
    """
    with _lock.now, torch.inference_mode(mode=False):
        yield


def revert(model: object, *, only: Names = None, exclude: Names = None) -> None:
    """Undo the patches of a model. Needs no handle, and works on a deepcopy too.

    Values that were set by other code since stay, and so do tensors that were trained since; both are reported on
    stderr. A patch that `only` names by its id is undone even then, and these values are lost.

    Args:
        model: As for `hfpatch.apply`.
        only: Ids or globs of the patches to undo; None for all.
        exclude: Ids or globs of the patches to keep.

    Raises:
        NotAModelError: `model` holds no torch module.
        UnknownPatchError: A name matches no patch.
        RevertError: Some edits could not be undone, e.g. because a compiled model was called. The others are not
            affected.
    """
    root = root_module(model)
    carried = {record.patch for _, _, record in logged(root)}  # of patches that are not installed here, too
    if not carried:
        check_not_traced(root)
    wanted = None if only is None else ids(only, carried)
    kept = ids(exclude, carried)
    with one_at_a_time():
        log = [
            entry
            for entry in logged(root)
            if (wanted is None or entry[2].patch in wanted) and entry[2].patch not in kept
        ]
        undo_all(root, log, named=set(names(only)))


def undo_all(model: nn.Module, log: list[tuple[str, nn.Module, Record]], named: Collection[str] = frozenset()) -> None:
    """Undo the edits of these records, in reverse module order, and report on stderr which ones stay.

    Args:
        model: The whole object.
        log: Records to undo, as `logged` returns them.
        named: Ids of the patches to undo even where a value was set or trained since.

    Raises:
        RevertError: Some edits could not be undone. The others are not affected.
    """
    unseen = any(r.change.unseen for _, _, r in log)
    compiled = compiled_already(Survey(model)) if unseen else None
    states = {id(r): state_of(model, module, r, compare=True) for _, module, r in log}
    trained = {(id(module), r.patch) for _, module, r in log if states[id(r)].word == "trained"}
    lines: dict[str, None] = {}
    blocked: dict[str, None] = {}
    for path, module, r in reversed(log):
        place, state = path or "the model", states[id(r)]
        obstacle = None if state == UNFINISHED else r.change.obstacle(model, module, r.before)
        if compiled and r.change.unseen:
            blocked[compiled] = None
        elif r.patch not in named and (state.word == "changed" or obstacle):
            lines[
                f"hfpatch: not reverted: {place}: {r.slot} is {obstacle or state.now}; {r.patch} had set it to "
                f"{show(r.after)}. hfpatch.revert(model, only={r.patch!r}) restores the value before the patch"
            ] = None
        elif r.patch not in named and (id(module), r.patch) in trained:
            lines[f"hfpatch: not reverted: {place} was trained since {r.patch} and keeps its values"] = None
            forget(module, r)
        else:
            lost = None if state == UNFINISHED else r.change.lost(model, module, r.before)
            try:
                undo(model, module, r)
            except (*REJECTIONS, NotImplementedError) as error:
                blocked[f"{r.patch}: {r.slot} of {place}: {type(error).__name__}: {error}"] = None
                if state != UNFINISHED and (there := record_at(module, r.change.place)) is not None:
                    advance(module, there, "written")  # no interruption: its state can be read from the model
            else:
                lines |= {f"hfpatch: {r.patch} reverted: {lost}": None} if lost is not None else {}
    say(list(lines))
    if blocked:
        raise RevertError(f"some edits could not be undone, which does not affect the others: {'; '.join(blocked)}")
