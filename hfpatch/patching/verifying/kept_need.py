"""A measured need, kept beside a checkpoint: a later plan of a model that was loaded from there decides with it.

The file holds the largest value of each module, the releases that measured it, what tells the weights from others, and
of the batch a digest and the number of tokens. No text, and no path of the machine.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hfpatch.errors import InputError
from hfpatch.given import shown
from hfpatch.inspecting.peaks import Peaks
from hfpatch.model.walk import peek
from hfpatch.model.wrapping import RUN_AGAIN, joined, unwrapped
from hfpatch.patching.proofs.bodies import release
from hfpatch.patching.verifying.same_weights import difference, files_seen, weights_seen
from hfpatch.patching.verifying.sealed import sealed, unsealed
from hfpatch.report.files import write_atomically
from hfpatch.untrusted.ordinary import read_ordinary

if TYPE_CHECKING:
    from hfpatch.model.survey import Survey

FILE = "hfpatch-measured.json"
SCHEMA = 1
MOST = 16 * 2**20
"""Largest size in bytes of the file."""
TOKENS = 10**12
AGAIN = "measure again: hfpatch plan MODEL --text FILE --save"


def keep_need(model: nn.Module, peaks: Peaks, batch: Mapping[str, Any]) -> Path:
    """Write what was measured beside the checkpoint that a model was loaded from, and return the file. Atomic.

    Raises:
        InputError: The model was not loaded from a directory, or the file cannot be written there.
    """
    path, inner = unwrapped("", model, RUN_AGAIN)
    folder = folder_of(inner)
    if folder is None:
        raise InputError(
            f"--save: this {type(inner).__name__} was not loaded from a directory, beside whose weights the "
            "measurement would be kept; load it from one"
        )
    file = folder / FILE
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise InputError(f"--save: {file} is not an ordinary file; remove it")
    try:
        weights = weights_seen(inner)
    except ValueError as error:
        raise InputError(f"--save: {error}") from error
    ids = batch.get("input_ids")
    values = {_below(path, at): value for at, value in peaks.values.items()}
    content = {
        "values": {at: None if math.isnan(value) else value for at, value in values.items() if at is not None},
        "releases": {name: release(name) for name in ("hfpatch", "torch", "transformers")},
        "batch": {"sha256": _digest(batch), "tokens": ids.numel() if isinstance(ids, torch.Tensor) else None},
        "class": type(inner).__name__,
        "files": files_seen(folder),
        "weights": weights,
    }
    text = sealed(content, SCHEMA, "measured")
    if len(text) > MOST:
        raise InputError(
            f"--save: the measurement of {len(values):,} modules takes {len(text):,} bytes, above {MOST:,}"
        )
    write_atomically(file, text)
    return file


def kept_need(survey: Survey) -> tuple[Peaks | None, str]:
    """Return what was measured of a model before, with its paths in the object; None if nothing was, or not of this.

    Also returns a sentence about a file that cannot be used; empty without one. At most 16 MiB are read, from an
    ordinary file only.
    """
    path, inner = unwrapped("", survey.root, RUN_AGAIN)
    folder = folder_of(inner)
    if folder is None:
        return None, ""
    try:
        return _peaks(read_ordinary(folder / FILE, MOST), inner, path, folder), ""
    except FileNotFoundError:
        return None, ""
    except InputError as error:
        return None, f"{FILE} beside the checkpoint is not used: {error}; {AGAIN}"


def folder_of(model: nn.Module) -> Path | None:
    """Return the directory that a model was loaded from, by its config; None if it was not."""
    name = peek(peek(model, "config"), "name_or_path")
    try:
        return Path(name) if isinstance(name, str) and name and Path(name).is_dir() else None
    except (OSError, ValueError):  # a name that is too long, or holds a null byte
        return None


def _peaks(raw: bytes, model: nn.Module, path: str, folder: Path) -> Peaks:
    """Return the measurement in a file, if it is of this model.

    Raises:
        InputError: It is damaged, newer, or of another model.
    """
    try:
        content = unsealed(raw, SCHEMA, "measured")
        values = {joined(path, at): _value(value) for at, value in content["values"].items()}
        tokens = content["batch"]["tokens"]
        weights: list[list[Any]] = content["weights"]
        if tokens is not None and not (type(tokens) is int and 0 < tokens < TOKENS):
            raise ValueError("no number of tokens")
        unloaded = any(p.is_meta for p in model.parameters())
        other = difference(weights, model)
        if not other and unloaded and content["files"] != files_seen(folder):
            other = "its files of weights are others"
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OSError) as error:
        raise InputError(f"it cannot be compared with this model ({type(error).__name__}: {error})") from error
    there = {joined(path, at) for at, _ in model.named_modules()}
    if not other and (unknown := next((at for at in values if at not in there), None)) is not None:
        other = f"it has no module {shown(unknown)}"
    if other:
        raise InputError(f"it was measured on another model than this {type(model).__name__}: {other}")
    return Peaks(values, f"on {tokens:,} tokens, kept in {FILE}" if tokens else f"on a batch, kept in {FILE}")


def _value(value: Any) -> float:
    if value is None:
        return math.nan
    if type(value) not in (int, float) or not 0 <= value <= torch.finfo(torch.float64).max:
        raise ValueError("a value that is no size")
    return float(value)


def _digest(batch: Mapping[str, Any]) -> str:
    """Return a digest of the integer tensors of a batch: the token ids."""
    digest = hashlib.sha256()
    for name in sorted(batch):
        value = batch[name]
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            digest.update(f"{name}\0{tuple(value.shape)}\0{value.detach().to('cpu', torch.int64).tolist()}".encode())
    return digest.hexdigest()


def _below(path: str, place: str) -> str | None:
    """Return a place in the wrapped object as one in the model; None for the wrapper itself."""
    if not path or place == path:
        return place if not path else ""
    return place.removeprefix(f"{path}.") if place.startswith(f"{path}.") else None
