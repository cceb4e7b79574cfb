"""Writes the manifest of a patched model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hfpatch.compat.quantising.quantised import saved_names
from hfpatch.errors import InputError
from hfpatch.given import shown
from hfpatch.model.wrapping import unwrapped
from hfpatch.patching import registry
from hfpatch.patching.decision import Decision, Decisions
from hfpatch.patching.edits import Edit
from hfpatch.patching.kinds.in_float32.set_buffer import SetBuffer
from hfpatch.patching.kinds.in_weights.scale_tensor import ScaleTensor
from hfpatch.patching.kinds.set_tensor import SetTensor
from hfpatch.patching.kinds.states import ABSENT, show
from hfpatch.patching.language import Effect
from hfpatch.patching.manifest import file
from hfpatch.patching.manifest.changes import encoded, identity
from hfpatch.patching.manifest.file import Manifest, SavedEdit, SavedPatch, Where
from hfpatch.patching.manifest.same_model import (
    attention_of,
    bodies_of,
    computed_of,
    releases,
    tensor_digest,
    weights_of,
)
from hfpatch.patching.manifest.typed import plain
from hfpatch.patching.proofs.proof import is_unsaved
from hfpatch.patching.record import Record, logged, state_of

CALL = "applied.save"


@dataclass
class _Held:
    """The tensors that edits set, and the ids of those in the model."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    changed: set[int] = field(default_factory=set[int])


def save(root: nn.Module, plan: Decisions, folder: Path) -> Path:
    """Write what is to be replayed on a model that is loaded from a checkpoint, and return the file.

    Args:
        root: The patched object.
        plan: The plan of one of its applications.
        folder: The directory of the checkpoint.

    Raises:
        InputError: There is no such directory, nothing is applied, an edit is no longer in force, a tensor is sharded,
            or a patch's function cannot be identified.
    """
    if not folder.is_dir():
        raise InputError(f"{CALL}: there is no directory {folder}; save the model there first")
    path, inner = unwrapped("", root)
    prefix = f"{path}." if path else ""
    log = _in_order(root, plan)
    if not log:
        raise InputError(f"{CALL}: this {type(inner).__name__} carries no patch; apply one first")
    held, groups = _Held(), dict[tuple[str, str | None, Effect], list[tuple[Decision | None, Record, SavedEdit]]]()
    for at, module, record, decision, was in log:
        where = _where(root, at, module, record)
        outside = at != path and not at.startswith(prefix)
        if outside and where != "adapter":
            raise InputError(f"{CALL}: {record.slot} of {at or 'the model'} is set on a wrapper, which no file holds")
        short = "" if outside or at == path else at.removeprefix(prefix)
        saved = _edit(short, module, record, was, where, held)
        submodel = None if decision is None or decision.submodel is None else decision.submodel.removeprefix(prefix)
        groups.setdefault((record.patch, submodel, _effect(record, decision)), []).append((decision, record, saved))
    try:
        named = (*inner.named_parameters(), *inner.named_buffers())
        changed = {name for name, tensor in named if id(tensor) in held.changed}
        in_checkpoint = frozenset(saved_names(inner))
        weights = weights_of(inner, in_checkpoint, changed)
    except ValueError as error:
        raise InputError(f"{CALL}: {error}") from error
    if not any(samples for *_, samples in weights) and len(weights) > len(held.changed):
        raise InputError(f"{CALL}: the weights are on meta, so they cannot be told from others; load them first")
    manifest = Manifest(
        type(inner).__name__,
        releases(),
        tuple(_patch(root, key, edits) for key, edits in groups.items()),
        tuple((name, tuple(shape), dtype, samples) for name, shape, dtype, samples in weights),
        bodies_of(inner),
        attention_of(inner),
        computed_of(inner, in_checkpoint, changed),
        file.packed(held.tensors),
    )
    return file.write(folder, manifest, held.tensors)


def _in_order(root: nn.Module, plan: Decisions) -> list[tuple[str, nn.Module, Record, Decision | None, str]]:
    """Return path, module, record, decision and value before of each edit, in the order of the plan; others first."""
    mine = {(id(e.module), e.change.place): (at, d, e) for at, (d, e) in enumerate(_edits(plan))}
    rows: list[tuple[int, tuple[str, nn.Module, Record, Decision | None, str]]] = []
    for path, module, record in logged(root):
        at, decision, edit = mine.get((id(module), record.change.place), (-1, None, None))
        plain_before = isinstance(record.before, (bool, int, float, str, type(None)))
        was = show(edit.before if edit is not None else record.before if plain_before else ABSENT)
        rows.append((at, (path, module, record, decision, was)))
    return [row for _, row in sorted(rows, key=lambda row: row[0])]


def _edits(plan: Decisions) -> Iterable[tuple[Decision, Edit]]:
    return ((decision, edit) for decision in plan.of("applied") for edit in decision.edits)


def _where(root: nn.Module, path: str, module: nn.Module, record: Record) -> Where:
    """Return where a saved checkpoint has an edit.

    Raises:
        InputError: It is no longer in force.
    """
    state = state_of(root, module, record, compare=True)
    if not state.in_force:
        raise InputError(
            f"{CALL}: {record.slot} of {path or 'the model'} is {state.now}, and {record.patch} had set it to "
            f"{show(record.after)}; apply it again, or revert it, then save"
        )
    if state.word == "trained":
        return "trained"
    persistent = isinstance(record.change, SetBuffer) and record.change.name in module.state_dict()
    return "weights" if persistent else record.change.in_checkpoint


def _edit(path: str, module: nn.Module, record: Record, was: str, where: Where, held: _Held) -> SavedEdit:
    change, digests = record.change, None
    if where != "trained" and isinstance(change, (SetTensor, SetBuffer, ScaleTensor)):
        digests = _keep(path, module, record, held)
    try:
        values = encoded(change)
        made = "" if values is not None else identity(change)
    except ValueError as error:
        raise InputError(
            f"{CALL}: {record.slot} of {path or 'the model'}, set by {record.patch}, cannot be saved: {error}; define "
            "it as a function at the top of a module, or as a frozen dataclass with plain fields"
        ) from error
    cls = type(module).__name__
    return SavedEdit(path, cls, record.slot, was, show(record.after), where, values, made, digests)


def _keep(path: str, module: nn.Module, record: Record, held: _Held) -> tuple[str, str]:
    """Keep the tensor that an edit set, as it is and as it was, and return the digests of both."""
    change: Any = record.change
    name = f"{path}.{change.name}" if path else change.name
    there: torch.Tensor = getattr(module, change.name)
    now = there.detach()
    if now.is_meta:
        raise InputError(f"{CALL}: {name}, which {record.patch} set, is on meta (offloaded); load it into memory first")
    held.changed.add(id(there))
    if isinstance(change, ScaleTensor):
        return tensor_digest(now * 2.0**-change.exponent), tensor_digest(now)
    after = change.values.tensor if isinstance(change, SetBuffer) else now
    # rounded as the tensor was since; a buffer's own dtype is part of the edit
    before = record.before if isinstance(change, SetBuffer) else record.before.to(now.dtype)
    for key, tensor in ((f"{name}:now", after), (f"{name}:was", before)):
        held.tensors[key] = tensor.detach().to("cpu").contiguous().clone()
    return tensor_digest(before), tensor_digest(after)


def _effect(record: Record, decision: Decision | None) -> Effect:
    """Return the effect that was decided; of an earlier application the declared one, or the strongest."""
    if decision is not None and decision.effect is not None:
        return decision.effect
    entry = registry.known(record.patch)
    return "changes-function" if entry is None or callable(entry.patch.effect) else entry.patch.effect


def _patch(
    root: nn.Module,
    key: tuple[str, str | None, Effect],
    edits: Iterable[tuple[Decision | None, Record, SavedEdit]],
) -> SavedPatch:
    patch_id, submodel, effect = key
    rows = list(edits)
    decision, record, _ = rows[0]
    entry = registry.known(patch_id)
    digest = "" if entry is None or is_unsaved(entry.digest) else entry.digest
    reason = decision.reason if decision is not None else "applied before"
    options = {} if decision is None else _options(root, patch_id, decision.options)
    return SavedPatch(patch_id, record.origin, digest, submodel, effect, reason, options, tuple(e for *_, e in rows))


def _options(root: nn.Module, patch_id: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as plain values; modules by their paths."""
    paths = {id(module): path for path, module in root.named_modules()}

    def named(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return paths.get(id(value), "")
        return [named(each) for each in value] if isinstance(value, (list, tuple, set, frozenset)) else value

    try:
        return {name: plain(named(value)) for name, value in given.items()}
    except TypeError as error:
        raise InputError(f"{CALL}: an option of {patch_id} cannot be saved: {shown(given)} ({error})") from error
