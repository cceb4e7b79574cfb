"""The manifest as data, and its files: `hfpatch.json` beside a checkpoint, and the tensors that its patches changed.

    hfpatch.json                            patches, options, edits, releases; what tells the model from others
    hfpatch-tensors/<digest>.safetensors    the tensors that an edit set, as they are and as they were

The tensors lie in a folder, because servers load every `*.safetensors` beside a config.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from hfpatch.errors import InputError
from hfpatch.patching.kinds.base import PLACES, InCheckpoint
from hfpatch.patching.language import Effect
from hfpatch.patching.manifest.typed import plain, typed
from hfpatch.patching.verifying.sealed import sealed, unsealed
from hfpatch.report import Sheet, Shown
from hfpatch.report.files import write_atomically
from hfpatch.untrusted.ordinary import read_ordinary

FILE = "hfpatch.json"
TENSORS = "hfpatch-tensors"
NAMED = re.compile(r"[0-9a-f]{16}\.safetensors|\.[0-9a-f]{16}\.tmp")
SCHEMA = 1
MOST = 64 * 2**20
"""Largest size in bytes of the manifest; one of a model with 1,000 tensors and 1,000 edits has 0.5 million."""
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Exceptions from reading a malformed file."""

Where = InCheckpoint | Literal["trained"]

WORDS: dict[Where, str] = {**PLACES, "trained": "in the weights, and trained since"}
"""Where a saved checkpoint has an edit -> in words."""


@dataclass(frozen=True)
class SavedEdit:
    """An edit in a manifest.

    Attributes:
        path: Path of the module in the model, without wrappers around it.
        cls: Name of the module's class.
        slot: As in `Edit.to_dict`.
        was: Its `before`, as in `Edit.to_dict`.
        now: Its `after`, as in `Edit.to_dict`.
        where: A key of `WORDS`.
        change: The change as data; None if the patch has to make it again.
        identity: What the patch has to make; empty for data.
        digests: Of the tensor that it set, before and after; None for an edit that sets none.
    """

    path: str
    cls: str
    slot: str
    was: str
    now: str
    where: Where
    change: dict[str, Any] | None
    identity: str
    digests: tuple[str, str] | None


@dataclass(frozen=True)
class SavedPatch:
    """The edits of one patch in one submodel.

    Attributes:
        id: Id of the patch.
        origin: As in `Entry.origin`.
        digest: As in `Entry.digest`; empty for a patch in no file.
        submodel: Path of the submodel; None for the object as a whole, or if it is not known.
        effect: Effect on the outputs.
        reason: Why it was applied.
        options: Those that the caller set.
        edits: The edits, in the order in which they are made.
    """

    id: str
    origin: str
    digest: str
    submodel: str | None
    effect: Effect
    reason: str
    options: dict[str, Any]
    edits: tuple[SavedEdit, ...]


@dataclass(frozen=True)
class Tensors:
    """The file of tensors: its name, size and SHA-256."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, repr=False)
class Manifest(Shown):
    """What a manifest says. Printing it shows which edits a saved checkpoint lacks.

    Attributes:
        model: Name of the model's class.
        releases: The releases that saved it, by package.
        patches: The patches.
        weights: Name, shape, dtype and samples of each tensor, as `weights_of` returns them.
        bodies: Digits of each forward, by name.
        attention: Attention implementations by path.
        computed: Digests of buffers that no checkpoint holds, by name.
        tensors: The file of tensors; None if no edit set one.
    """

    model: str
    releases: dict[str, str]
    patches: tuple[SavedPatch, ...]
    weights: tuple[tuple[str, tuple[int, ...], str, str], ...]
    bodies: dict[str, str]
    attention: dict[str, str]
    computed: dict[str, str]
    tensors: Tensors | None

    @property
    def again(self) -> tuple[str, ...]:
        """Ids of the patches that whoever loads the checkpoint has to apply again."""
        return tuple(dict.fromkeys(p.id for p in self.patches if any(e.where == "nowhere" for e in p.edits)))

    def sheet(self) -> Sheet:
        """Return a table of the patches."""
        rows: dict[tuple[str, str, str], int] = {}
        for patch in self.patches:
            for edit in patch.edits:
                key = (f"{patch.id}\n{patch.origin}".strip(), patch.effect, WORDS[edit.where])
                rows[key] = rows.get(key, 0) + 1
        note = (
            "hfpatch.load(DIR), or hfpatch.apply(model, manifest=DIR) on the loaded model, applies it"
            if self.again
            else "the checkpoint has all of it: nothing is to be applied again"
        )
        columns = ("patch", "edits", "effect", "in the checkpoint")
        table = tuple((patch, str(count), effect, where) for (patch, effect, where), count in rows.items())
        title = f"Manifest {FILE} of a {self.model}, hfpatch {self.releases.get('hfpatch', '?')}"
        return Sheet(title, columns, table, (note,), wide=("in the checkpoint",))

    def to_dict(self) -> dict[str, Any]:
        """Return model, releases, patches with their edits, and again, for JSON."""
        return {
            "model": self.model,
            "releases": self.releases,
            "again": list(self.again),
            "patches": [
                {
                    "patch": p.id,
                    "origin": p.origin,
                    "digest": p.digest,
                    "submodel": p.submodel,
                    "effect": p.effect,
                    "options": p.options,
                    "edits": [
                        {"path": e.path, "slot": e.slot, "before": e.was, "after": e.now, "in": e.where}
                        for e in p.edits
                    ],
                }
                for p in self.patches
            ],
        }


def read(folder: Path) -> Manifest | None:
    """Return the manifest beside a checkpoint; None if there is none. No tensor is read.

    Raises:
        InputError: It is no ordinary file, too large, damaged, edited, or of a later schema.
    """
    try:
        return typed(unsealed(read_ordinary(folder / FILE, MOST), SCHEMA, "manifest"), Manifest)
    except FileNotFoundError:
        return None
    except InputError as error:
        raise InputError(f"{folder / FILE} cannot be used: {error}; save it again with applied.save(dir)") from error
    except MALFORMED as error:
        why = " ".join(str(error).split())[:200]
        raise InputError(
            f"{folder / FILE} is no manifest of hfpatch ({type(error).__name__}: {why}); save it again with "
            "applied.save(dir)"
        ) from error


def missing(place: object) -> str:
    """Return the sentence about a directory, or a model of the hub, without a manifest."""
    return f"{place} holds no {FILE}, which applied.save(dir) writes beside a checkpoint"


def read_tensors(folder: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Return the tensors of a manifest by key, on the CPU.

    Raises:
        InputError: Their file is missing, no ordinary file, or not the one that was saved.
    """
    said = manifest.tensors
    if said is None:
        return {}
    file = folder / TENSORS / said.name
    again = "save the manifest again with applied.save(dir)"
    try:
        if NAMED.fullmatch(said.name) is None:
            raise FileNotFoundError
        raw = read_ordinary(file, said.bytes)
        if len(raw) != said.bytes or hashlib.sha256(raw).hexdigest() != said.sha256:
            raise InputError("it was changed after it was saved: its digest is another")
        return load(raw)
    except FileNotFoundError as error:
        raise InputError(f"{file} is not there; {again}") from error
    except (InputError, SafetensorError) as error:
        raise InputError(f"{file} cannot be used: {error}; {again}") from error


def write(folder: Path, manifest: Manifest, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a manifest and its tensors, and return the manifest's path. Readers see the old one or the new one.

    The tensors are written first, under a name made of their digest; those of an older manifest are removed last.

    Raises:
        InputError: A file cannot be written, or the manifest is too large.
    """
    file, inner = folder / FILE, folder / TENSORS
    for place, fits in ((file, file.is_file()), (inner, inner.is_dir())):
        if place.is_symlink() or (place.exists() and not fits):
            raise InputError(f"applied.save: {place} is not an ordinary {'file' if place == file else 'directory'}")
    text = sealed(plain(manifest), SCHEMA, "manifest")
    if len(text) > MOST:
        raise InputError(f"applied.save: the manifest takes {len(text):,} bytes, above {MOST:,}")
    try:
        if manifest.tensors is not None:
            inner.mkdir(exist_ok=True)
            write_atomically(inner / manifest.tensors.name, save(tensors))
        write_atomically(file, text)
        _clear(inner, manifest.tensors.name if manifest.tensors else "")
    except OSError as error:
        raise InputError(f"applied.save: cannot write {inner}: {error.strerror or error}") from error
    return file


def packed(tensors: dict[str, torch.Tensor]) -> Tensors | None:
    """Return what a manifest says of a file with these tensors; None without any."""
    if not tensors:
        return None
    raw = save(tensors)
    digest = hashlib.sha256(raw).hexdigest()
    return Tensors(f"{digest[:16]}.safetensors", len(raw), digest)


def _clear(folder: Path, name: str) -> None:
    """Remove the files of older manifests, and what a killed process left; an empty folder too."""
    if not folder.is_dir():
        return
    for file in folder.iterdir():
        if NAMED.fullmatch(file.name) and file.name != name:
            file.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
