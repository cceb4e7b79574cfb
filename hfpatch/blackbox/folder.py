"""Bundles in a directory: written atomically, limited in number and size.

A bundle is written to a hidden directory beside its final place, synced to disk and renamed. A half-written one of a
killed process stays hidden, and a later writer removes it once it is old. Only bundles of this format and of the
writer's own rank are counted and removed; other files and directories are left alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfpatch.errors import InputError
from hfpatch.untrusted.ordinary import read_json

FORMAT = 1
BATCH = "batch.safetensors"
ABOUT = "bundle.json"
LARGEST = 64 * 2**20
"""Largest bundle.json that is read, in bytes; a usual one has some ten thousand."""
HIDDEN = ".hfpatch-"
ABANDONED = 600.0
"""Age in seconds after which a hidden directory counts as abandoned: writing one takes a few."""
NAME = re.compile(r"step-(\d{8,})-rank(\d+)(?:-\d+)?")


def stem(step: int) -> str:
    """Return the name of a step's bundles, up to the rank."""
    return f"step-{step:08}-rank"


def write(directory: Path, name: str, about: Mapping[str, Any], batch: bytes | None) -> Path:
    """Write a bundle; existing bundles are not overwritten.

    Args:
        directory: Directory of the bundles; made if it is missing.
        name: Name of the bundle; a number is added if the name is taken.
        about: The contents of `bundle.json`, plain values; their digest is added.
        batch: The contents of `batch.safetensors`; None for no such file.

    Returns:
        The directory of the bundle.

    Raises:
        OSError: The bundle cannot be written; no part of it is left.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _clear_abandoned(directory)
    temporary = Path(tempfile.mkdtemp(prefix=HIDDEN, dir=directory))
    try:
        temporary.chmod(0o777 & ~_umask())
        if batch is not None:
            _write_synced(temporary / BATCH, batch)
        text = json.dumps({**about, "sha256": digest(about)}, indent=1, allow_nan=False)
        _write_synced(temporary / ABOUT, text.encode())
        _sync(temporary)
        place = _move(temporary, directory / name)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(directory)
    return place


def digest(about: Mapping[str, Any]) -> str:
    """Return the SHA-256 of plain values in hexadecimal, independent of key order and layout."""
    return sha256(json.dumps(about, sort_keys=True, separators=(",", ":")).encode())


def sha256(data: bytes) -> str:
    """Return the SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def bound(directory: Path, rank: int, keep: Path | None, max_bundles: int, max_bytes: int) -> None:
    """Remove the oldest bundles of a rank until the others are within the limits.

    Args:
        directory: Directory of the bundles.
        rank: The rank.
        keep: A bundle that is never removed.
        max_bundles: Maximum number of bundles.
        max_bytes: Maximum size of all bundles together.

    Raises:
        OSError: A bundle cannot be removed.
    """
    held = sorted((path.stat().st_mtime_ns, path.name, size(path), path) for path in _bundles(directory, rank))
    count, total = len(held), sum(entry[2] for entry in held)
    for _, _, bytes_, path in held:
        if count <= max_bundles and total <= max_bytes:
            return
        if path == keep:
            continue
        hidden = Path(tempfile.mkdtemp(prefix=HIDDEN, dir=directory))
        path.rename(hidden / path.name)  # a rename is atomic: readers never see half a bundle
        shutil.rmtree(hidden)
        count, total = count - 1, total - bytes_


def size(path: Path) -> int:
    """Return the bytes in a bundle; 0 if it is gone."""
    return sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else 0


def _bundles(directory: Path, rank: int) -> list[Path]:
    named = [(path, NAME.fullmatch(path.name)) for path in directory.iterdir()]
    return [p for p, m in named if m and int(m[2]) == rank and not p.is_symlink() and _format(p) == FORMAT]


def _format(path: Path) -> Any:
    try:
        about: Any = read_json(path / ABOUT, LARGEST)
        return about.get("format")
    except (OSError, InputError, AttributeError):
        return None


def _move(temporary: Path, place: Path) -> Path:
    """Move a directory to the first free name: a rename onto a directory fails unless that is empty."""
    number = 1
    while True:
        free = place if number == 1 else place.with_name(f"{place.name}-{number}")
        if not free.exists():
            try:
                temporary.rename(free)
            except OSError:
                if not free.exists():
                    raise
            else:
                return free
        number += 1


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    if os.name == "nt":  # Windows cannot open directories
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _clear_abandoned(directory: Path) -> None:
    for path in directory.glob(f"{HIDDEN}*"):
        try:
            old = time.time() - path.stat().st_mtime > ABANDONED
        except FileNotFoundError:
            continue  # another writer removed it
        if old:
            shutil.rmtree(path, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
