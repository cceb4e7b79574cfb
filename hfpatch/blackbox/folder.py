"""Bundles in a directory: written whole or not at all, bounded in number and size.

A bundle is written in a hidden directory beside its place, synced to disk and moved there in one step. What a killed
process left half-written is hidden, and removed by a later writer once it is old. Only bundles that this version can
read, of the writer's own rank, count and are removed; whatever else lies in the directory is left alone.
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

FORMAT = 1
BATCH = "batch.safetensors"
ABOUT = "bundle.json"
HIDDEN = ".hfpatch-"
ABANDONED = 600.0
"""Seconds after which a hidden directory is no longer being written: it takes a few."""
NAME = re.compile(r"step-(\d{8,})-rank(\d+)(?:-\d+)?")


def stem(step: int) -> str:
    """Name of a step's bundles, up to the rank."""
    return f"step-{step:08}-rank"


def write(directory: Path, name: str, about: Mapping[str, Any], batch: bytes | None) -> Path:
    """Write a bundle; nothing is written over.

    Args:
        directory: Made if it is missing.
        name: Of the bundle; a number is added where there is one of that name.
        about: What `bundle.json` holds, plain values; its digest is added.
        batch: What `batch.safetensors` holds; None for no such file.

    Returns:
        Where it is.

    Raises:
        OSError: It cannot be written; the directory is as it was.
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
    """SHA-256 of plain values, whatever their order and layout in a file."""
    return sha256(json.dumps(about, sort_keys=True, separators=(",", ":")).encode())


def sha256(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def bound(directory: Path, rank: int, keep: Path | None, max_bundles: int, max_bytes: int) -> None:
    """Remove the oldest bundles of a rank until the others are within the bounds.

    Args:
        directory: Where they are.
        rank: Whose.
        keep: One that stays, whatever its age.
        max_bundles: How many stay.
        max_bytes: How large they may be together.

    Raises:
        OSError: One cannot be removed.
    """
    held = sorted((path.stat().st_mtime_ns, path.name, size(path), path) for path in _bundles(directory, rank))
    count, total = len(held), sum(entry[2] for entry in held)
    for _, _, bytes_, path in held:
        if count <= max_bundles and total <= max_bytes:
            return
        if path == keep:
            continue
        hidden = Path(tempfile.mkdtemp(prefix=HIDDEN, dir=directory))
        path.rename(hidden / path.name)  # gone in one step: a bundle is never seen in part
        shutil.rmtree(hidden)
        count, total = count - 1, total - bytes_


def size(path: Path) -> int:
    """Bytes in a bundle; 0 if it is gone."""
    return sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else 0


def _bundles(directory: Path, rank: int) -> list[Path]:
    named = [(path, NAME.fullmatch(path.name)) for path in directory.iterdir()]
    return [p for p, m in named if m and int(m[2]) == rank and not p.is_symlink() and _format(p) == FORMAT]


def _format(path: Path) -> Any:
    try:
        about: Any = json.loads((path / ABOUT).read_bytes())
        return about.get("format")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def _move(temporary: Path, place: Path) -> Path:
    """Move a directory to a place that is free: to rename one onto another fails unless that is empty."""
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
    if os.name == "nt":  # Windows opens no directories
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
            continue  # another writer was quicker
        if old:
            shutil.rmtree(path, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
