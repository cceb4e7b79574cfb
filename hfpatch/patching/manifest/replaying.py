"""Replays a manifest on a model that was loaded from its checkpoint, or on the model that was patched; on no other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfpatch.compat import implementation
from hfpatch.compat.quantising.quantised import saved_names
from hfpatch.errors import ConflictError, HfpatchError, InputError, RefusedError
from hfpatch.given import shown
from hfpatch.model.rebuilt import holds, is_rounding_of
from hfpatch.model.survey import Survey
from hfpatch.model.walk import root_module
from hfpatch.model.wrapping import joined, unwrapped
from hfpatch.patching import registry
from hfpatch.patching.applied import Applied
from hfpatch.patching.arguments import settings
from hfpatch.patching.context import Context
from hfpatch.patching.decision import Decision, Decisions
from hfpatch.patching.edits import Edit
from hfpatch.patching.kinds.attention_names import OURS, STOCK
from hfpatch.patching.kinds.base import Change
from hfpatch.patching.kinds.choose_attention import ChooseAttention
from hfpatch.patching.kinds.in_float32.set_buffer import SetBuffer
from hfpatch.patching.kinds.in_weights.scale_tensor import Largest, ScaleTensor
from hfpatch.patching.kinds.set_attribute import SetAttribute, settable
from hfpatch.patching.kinds.set_tensor import SetTensor
from hfpatch.patching.kinds.states import show
from hfpatch.patching.manifest.changes import decoded, identity
from hfpatch.patching.manifest.file import FILE, MALFORMED, Manifest, SavedEdit, SavedPatch, missing, read, read_tensors
from hfpatch.patching.manifest.same_model import (
    other_attention,
    other_bodies,
    other_computed,
    other_weights,
    releases,
    tensor_digest,
)
from hfpatch.patching.preconditions.compiled import compiled_already
from hfpatch.patching.record import record_at, records_of, state_of
from hfpatch.patching.registering.installed import of_packages, offers
from hfpatch.patching.registry import Entry
from hfpatch.patching.writing import carry_out

ANEW = "nothing was changed; hfpatch.apply(model) decides anew"


@dataclass
class _Todo:
    """The edits of one patch, sorted by what is in the model already."""

    edits: list[Edit] = field(default_factory=list[Edit])
    there: list[tuple[Edit, Any]] = field(default_factory=list[tuple[Edit, Any]])
    """Edits that the saved weights have, with the data that undoing needs."""
    already: int = 0


def replay(model: object, folder: Path, trusted: Iterable[str]) -> tuple[Applied, list[str]]:
    """Make the edits of a manifest, all or nothing. An edit that is in force already is left as it is.

    Args:
        model: As for `hfpatch.apply`.
        folder: The directory of the manifest.
        trusted: Installed packages whose patches may be imported.

    Returns:
        The handle, and sentences about what is other than when the manifest was saved.

    Raises:
        InputError: There is no manifest, or it or its tensors cannot be used.
        RefusedError: The model is another, a patch is not registered, or an edit cannot be made; nothing was changed.
        ConflictError: Another patch is in force in the same place.
        ApplyError: An edit failed; the edits before it were undone.
    """
    manifest = read(folder)
    if manifest is None:
        if folder.is_file():
            raise InputError(f"apply: {folder} is a file; manifest= wants the directory with {FILE}")
        raise InputError(f"apply: {missing(folder)}")
    root = root_module(model)
    path, inner = unwrapped("", root)
    entries = {each.id: _entry(each, of_packages(trusted)) for each in manifest.patches}
    in_checkpoint = frozenset(saved_names(inner))
    _check_same(manifest, inner, in_checkpoint, folder)
    survey = Survey(root)
    tensors = read_tensors(folder, manifest)
    decisions: list[Decision] = []
    there: list[tuple[Edit, Any, Decision]] = []
    for each in manifest.patches:
        made = _Maker(survey, path, entries[each.id], each, tensors, folder)
        todo = made.todo()
        decision = _decision(each, path, todo)
        decisions.append(decision)
        there.extend((edit, before, decision) for edit, before in todo.there)
    unseen = any(e.change.unseen for d in decisions for e in d.edits)
    if unseen and (why := compiled_already(survey)):
        raise RefusedError(f"apply: {FILE} cannot be replayed: {why}; nothing was changed")
    plan = Decisions(type(root).__name__, tuple(decisions), named=frozenset(d.patch for d in decisions))
    applied = Applied(root, plan, carry_out(root, plan, there))
    computed = other_computed(manifest.computed, inner, in_checkpoint)
    return applied, [*other_attention(manifest.attention, inner), *computed]


def _entry(saved: SavedPatch, trusted: Collection[str]) -> Entry:
    """Return the patch of a manifest, as it is registered here. Imports nothing that is not trusted."""
    entry = registry.known(saved.id)
    if entry is None and saved.id in trusted:
        entry = registry.get(saved.id)
    if entry is None:
        offered = offers().get(saved.id, ())
        whose = f" of {saved.origin}" if saved.origin else ""
        todo = (
            f"it is offered by {offered[0].package}, whose code is not run unasked: pass "
            f"trust={offered[0].package.name!r} to run it"
            if offered
            else "hfpatch.register it, or install its package, first"
        )
        raise RefusedError(
            f"apply: {FILE} needs the patch {saved.id}{whose}, which is not registered in this process; {todo}"
        )
    if _package(saved.origin) != _package(entry.origin):
        raise RefusedError(
            f"apply: {FILE} needs the patch {saved.id} ({saved.origin or 'of hfpatch itself'}), and here it is another "
            f"one ({entry.origin or 'of hfpatch itself'}); nothing was changed"
        )
    return entry


def _package(origin: str) -> str:
    """Return the origin of a patch without the version of its package."""
    return origin.rpartition(" ")[0] or origin


def _check_same(manifest: Manifest, inner: nn.Module, in_checkpoint: Collection[str], folder: Path) -> None:
    """Raise an error if a model is another than the one that was saved, or runs other code.

    Raises:
        RefusedError: It is, with the first difference.
    """
    try:
        if other := other_weights(manifest.weights, inner, in_checkpoint):
            raise RefusedError(
                f"apply: {folder / FILE} was saved for another model than this {type(inner).__name__}: {other}; load "
                f"the checkpoint beside it (hfpatch.load does); {ANEW}"
            )
    except ValueError as error:
        raise RefusedError(f"apply: {FILE} cannot be compared with this model: {error}; {ANEW}") from error
    if other := other_bodies(manifest.bodies, inner):
        now = releases()
        moved = [f"{k} {v}, now {now.get(k)}" for k, v in manifest.releases.items() if now.get(k) != v]
        since = f" (saved with {', '.join(moved)})" if moved else ""
        raise RefusedError(f"apply: {folder / FILE} was saved for other code: {other}{since}; {ANEW}, and save again")


def _decision(saved: SavedPatch, prefix: str, todo: _Todo) -> Decision:
    done = todo.already + len(todo.there)
    reason = f"replayed from {FILE}: {saved.reason}"
    idle = not todo.edits and not todo.there
    return Decision(
        saved.id,
        None if saved.submodel is None else joined(prefix, saved.submodel),
        "not needed" if idle else "applied",
        f"already applied ({done} edits), as {FILE} says" if idle else reason,
        saved.effect,
        tuple(todo.edits),
        already=done,
        origin=saved.origin,
        code="already-applied" if idle else "replayed",
        options=saved.options,
    )


class _Maker:
    """Turns the saved edits of one patch into edits of a model. Changes nothing."""

    def __init__(
        self,
        survey: Survey,
        prefix: str,
        entry: Entry,
        saved: SavedPatch,
        tensors: dict[str, torch.Tensor],
        folder: Path,
    ) -> None:
        self.survey, self.prefix, self.entry, self.saved = survey, prefix, entry, saved
        self.tensors, self.folder = tensors, folder

    def todo(self) -> _Todo:
        """Return the edits by their present state.

        Raises:
            RefusedError: One cannot be made, or its place is not as it was.
            ConflictError: Another patch is in force there.
        """
        todo = _Todo()
        for each in self.saved.edits:
            if each.where in ("adapter", "trained"):
                todo.already += 1  # with the weights, which were compared
                continue
            module = self.survey.modules.get(joined(self.prefix, each.path))
            if module is None or type(module).__name__ != each.cls:
                found = "is not there" if module is None else f"is a {type(module).__name__}, and was a {each.cls}"
                raise self._refused(each, f"{each.path or 'the model'} {found}")
            self._add(todo, each, module)
        return todo

    def _add(self, todo: _Todo, saved: SavedEdit, module: nn.Module) -> None:
        change = self._change(saved, module)
        edit = Edit(joined(self.prefix, saved.path), module, change, change.now(module))
        record = record_at(module, change.place)
        if record is not None and state_of(self.survey.root, module, record).in_force:
            same = record.change == change or (
                saved.digests is not None and _digest(change, module) == saved.digests[1]
            )
            if record.patch != self.saved.id or not same:
                raise ConflictError(
                    f"apply: {FILE} wants {edit.slot} of {edit.path or 'the model'} to be {saved.now}, and "
                    f"{record.patch} has set it to {show(record.after)}: revert that first"
                )
            todo.already += 1
        elif saved.where == "weights" and _digest(change, module) == self._digests(saved)[1]:
            todo.there.append((edit, self._before(saved, change, module)))
        else:
            self._check_before(saved, change, module)
            todo.edits.append(edit)

    def _change(self, saved: SavedEdit, module: nn.Module) -> Change:
        if saved.change is None:
            return self._made_again(saved, module)
        tensor = self.tensors.get(f"{self._name(saved)}:now")
        try:
            change = decoded(saved.change, tensor)
        except MALFORMED as error:
            raise self._unreadable(saved, str(error)) from error
        if tensor is not None and tensor_digest(tensor) != self._digests(saved)[1]:
            raise self._unreadable(saved, "its tensor is another than the one that was saved")
        there = getattr(module, str(saved.change.get("name")), None)
        fits = isinstance(there, torch.Tensor) and tensor is not None and there.shape == tensor.shape
        if isinstance(change, (SetTensor, SetBuffer)) and tensor is not None and not fits:
            raise self._refused(saved, f"there is no tensor of shape {tuple(tensor.shape)}")
        if isinstance(change, SetAttribute) and not settable(module, change.name):
            raise self._refused(saved, f"{change.name} is a property of {type(module).__name__}")
        if isinstance(change, ChooseAttention):
            stock = set(implementation.taken(type(module)) if isinstance(module, PreTrainedModel) else ()) & {*STOCK}
            if change.implementation not in (*stock, *OURS):
                why = f"{type(module).__name__} has no attention {shown(change.implementation)} of torch or hfpatch"
                raise self._refused(saved, why)
        return change

    def _made_again(self, saved: SavedEdit, module: nn.Module) -> Change:
        """Return a change that is no data: the one in force, or one that the patch makes here, if it is the same."""
        for record in records_of(module):
            if record.patch == self.saved.id and _identity(record.change) == saved.identity:
                return record.change
        found = ""
        for edit in self._resolved():
            if edit.path == joined(self.prefix, saved.path) and edit.slot == saved.slot:
                found = _identity(edit.change)
                if found == saved.identity:
                    return edit.change
        why = f"{self.saved.id} makes it by {found} here" if found else f"{self.saved.id} does not make it here"
        raise self._refused(saved, f"it was made by {saved.identity}, and {why}")

    def _resolved(self) -> Iterator[Edit]:
        patch, survey, name = self.entry.patch, self.survey, self.saved.id
        options = {**patch.options, **settings({name: self.entry}, {name: self.saved.options})[name]}
        for submodel in (None,) if patch.whole else survey.submodels:
            for template in patch.edits:
                try:
                    yield from list(template.resolve(Context(survey, submodel, None, options)))
                except HfpatchError:
                    raise
                except MALFORMED as error:
                    raise InputError(
                        f"{self.folder / FILE}: {self.saved.id} cannot be resolved with the options there "
                        f"({type(error).__name__}: {error})"
                    ) from error

    def _digests(self, saved: SavedEdit) -> tuple[str, str]:
        if saved.digests is None:
            raise self._unreadable(saved, "it has no digests")
        return saved.digests

    def _name(self, saved: SavedEdit) -> str:
        """Return the name, in the model, of the tensor that an edit sets."""
        return joined(saved.path, str((saved.change or {}).get("name")))

    def _before(self, saved: SavedEdit, change: Change, module: nn.Module) -> Any:
        """Return the data that undoing an edit of saved weights needs."""
        if isinstance(change, ScaleTensor):
            there: Any = change.inverse(self.survey.root, module)
            return Largest(there.at, there.value * 2.0**-change.exponent)
        before = self.tensors.get(f"{self._name(saved)}:was")
        if before is None or tensor_digest(before) != self._digests(saved)[0]:
            raise self._unreadable(saved, "the tensor before the patch is another than the one that was saved")
        return before.to(getattr(module, str((saved.change or {}).get("name"))).device)

    def _check_before(self, saved: SavedEdit, change: Change, module: nn.Module) -> None:
        """Raise an error if the place of an edit holds something else than it did before the patch, or after it."""
        if isinstance(change, SetAttribute):
            now = show(change.now(module))
            if now not in (saved.was, saved.now):
                raise self._refused(saved, f"it is {now}, and was {saved.was} before the patch")
        elif isinstance(change, SetBuffer):
            buffer, exact = getattr(module, change.name, None), change.values.tensor
            if buffer is None or not (buffer.is_meta or holds(buffer, exact) or is_rounding_of(buffer, exact)):
                raise self._refused(saved, "the buffer holds other values")
        elif isinstance(change, (SetTensor, ScaleTensor)) and _digest(change, module) != self._digests(saved)[0]:
            raise self._refused(
                saved, f"{change.name} holds other values than before and after the patch, or none in memory"
            )

    def _unreadable(self, saved: SavedEdit, why: str) -> InputError:
        place = f"{saved.slot} of {saved.path or 'the model'}"
        return InputError(f"{self.folder / FILE}: {place} cannot be used: {why}; save it again with applied.save(dir)")

    def _refused(self, saved: SavedEdit, why: str) -> RefusedError:
        place = f"{saved.slot} of {saved.path or 'the model'}"
        return RefusedError(f"apply: {FILE} sets {place} ({self.saved.id}), which cannot be made: {why}; {ANEW}")


def _digest(change: Change, module: nn.Module) -> str:
    """Return the digest of the tensor that a change sets; empty if it is not there, or not in memory."""
    tensor = getattr(module, getattr(change, "name", ""), None)
    return tensor_digest(tensor) if isinstance(tensor, torch.Tensor) and not tensor.is_meta else ""


def _identity(change: Change) -> str:
    try:
        return identity(change)
    except ValueError as error:
        return f"something that cannot be compared ({error})"
