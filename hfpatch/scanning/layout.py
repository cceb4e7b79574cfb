"""Which weight files a path means."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfpatch.errors import InputError
from hfpatch.scanning.result import brief

SUFFIX = ".safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
LONGEST_INDEX = 2**28
"""Bytes of an index, at most; those of the largest models have some 20 MB."""

_INDEX = re.compile(r".+\.safetensors\.index(\.[^.]+)?\.json")  # diffusers puts a variant before .json
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Index:
    """An index of shards: tensor -> file name, and the bytes of all tensors that it says."""

    name: str
    where: Mapping[str, str]
    total: float | None


@dataclass(frozen=True)
class Folder:
    """Weight files of one directory.

    Attributes:
        label: What stands before the names of its files in a report.
        files: To read, by name.
        indexes: Those that could be read.
        broken: What is wrong with the others, by name.
        names: Of all safetensors files there.
    """

    label: str = ""
    files: Mapping[str, Path] = field(default_factory=dict[str, Path])
    indexes: Sequence[Index] = ()
    broken: Mapping[str, str] = field(default_factory=dict[str, str])
    names: frozenset[str] = frozenset()


def find(name: str | Path) -> tuple[Path, list[Folder], list[str]]:
    """What a name means: its path, its folders of weights, and directories in it that hold more and are left out.

    A directory means the safetensors files in it; one that has none (a diffusers pipeline) those of the directories
    in it. A hub name means what the local cache has of it.

    Raises:
        InputError: There is no such thing, it is nothing of safetensors, or it is an index that cannot be used.
    """
    path = Path(name).expanduser()
    try:
        if not path.exists() and _HUB_NAME.fullmatch(str(name)):
            path = _cached(str(name))
        if path.is_dir():
            return path, *_directory(path)
        if not path.exists():
            raise InputError(f"{name}: no such file or directory; want a safetensors file, an index or a directory")
        return path, [_file(path)], []
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror or error}") from error


def total_bytes(name: str | Path) -> int:
    """Bytes of the files that a scan of a name reads, for a progress bar.

    Raises:
        InputError: As `find`.
    """
    files = (file for folder in find(name)[1] for file in folder.files.values())
    return sum(file.stat().st_size for file in files if file.is_file())


def _file(path: Path) -> Folder:
    if path.suffix == SUFFIX:
        return Folder(files={path.name: path})
    if path.suffix in PICKLES:
        raise InputError(f"{path} is a pickle: reading one may run code, so none is read; convert it to safetensors")
    if path.suffix != ".json":
        raise InputError(f"{path}: want a safetensors file, an index of shards, or a directory of them")
    try:
        index = _read_index(path)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    names = _names(path.parent)
    shards = sorted(set(index.where.values()) & names)
    return Folder("", {shard: path.parent / shard for shard in shards}, [index], names=names)


def _directory(path: Path) -> tuple[list[Folder], list[str]]:
    inside = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.endswith(SUFFIX))
    more = {p.name: folder for p in inside if (folder := _folder(p, f"{p.name}/"))}
    here = _folder(path, "")
    if here:
        return [here], list(more)
    if more:
        return list(more.values()), []
    pickles = sorted(p.name for p in path.iterdir() if p.suffix in PICKLES)
    if pickles:
        raise InputError(
            f"{path}: no safetensors file in it, only pickles such as {brief(pickles[0])}: reading one may run code, "
            "so none is read; convert them to safetensors"
        )
    raise InputError(f"{path}: want safetensors files; there are none in it, nor in the directories in it")


def _folder(path: Path, label: str) -> Folder | None:
    try:
        names = _names(path)
        found = sorted(p for p in path.iterdir() if _INDEX.fullmatch(p.name))
    except PermissionError:
        if not label:
            raise
        return None
    indexes: list[Index] = []
    broken: dict[str, str] = {}
    for file in found:
        try:
            indexes.append(_read_index(file))
        except InputError as error:
            broken[file.name] = str(error)
    if not names and not found:
        return None
    return Folder(label, {name: path / name for name in sorted(names)}, indexes, broken, names)


def _names(path: Path) -> frozenset[str]:
    return frozenset(p.name for p in path.iterdir() if p.name.endswith(SUFFIX))


def _read_index(file: Path) -> Index:
    """Raises InputError, without the file's name, if it is no index or names what is no plain file name."""
    try:
        if not file.is_file():
            raise InputError("it is no file that can be read")
        if file.stat().st_size > LONGEST_INDEX:
            raise InputError(f"it has {file.stat().st_size:,} bytes, more than any index")
        raw: Any = json.loads(file.read_bytes(), object_pairs_hook=_once)
    except OSError as error:
        raise InputError(f"it cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise InputError("it is nested too deep to be an index") from error
    except ValueError as error:  # an InputError is one
        raise InputError(str(error) if isinstance(error, InputError) else "it is no JSON") from error
    where: Any = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(where, dict) or not all(isinstance(shard, str) for shard in where.values()):
        raise InputError("it is no index: want a weight_map from tensors to file names")
    outside = next((s for s in where.values() if Path(s).name != s or "\\" in s or not s.endswith(SUFFIX)), None)
    if outside is not None:
        raise InputError(f"it names {brief(outside)}, which is no safetensors file beside it; nothing else is opened")
    metadata: Any = raw.get("metadata")
    total: Any = metadata.get("total_size") if isinstance(metadata, dict) else None
    return Index(file.name, where, total if type(total) in (int, float) else None)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise InputError(f"it names {brief(again)} twice")
    return found


def _cached(name: str) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.snapshot_download(name, local_files_only=True))
    except (errors.LocalEntryNotFoundError, errors.HFValidationError) as error:
        raise InputError(
            f"{name}: no such file or directory, and no model of that name in the local cache; fetch it with "
            f"`hf download {name}`, or give a directory"
        ) from error
