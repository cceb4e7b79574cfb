"""Finds the weight files under a path."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfpatch.errors import InputError
from hfpatch.untrusted.ordinary import brief, read_json

SUFFIX = ".safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
LONGEST_INDEX = 2**27
"""Largest index that is read, in bytes; those of the largest models have some 20 MB."""

_INDEX = re.compile(r".+\.safetensors\.index(\.[^.]+)?\.json")  # diffusers puts a variant before .json
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Index:
    """An index of shards.

    Attributes:
        name: Its file name.
        where: File name by tensor.
        total: The size of all tensors in bytes, as the index states it; None if it does not.
    """

    name: str
    where: Mapping[str, str]
    total: float | None


@dataclass(frozen=True)
class Folder:
    """Weight files of one directory.

    Attributes:
        label: Prefix of the names of its files in a report.
        files: The files to read, by name.
        indexes: The indexes that could be read.
        broken: The faults of the other indexes, by name.
        names: Names of all safetensors files in the directory.
    """

    label: str = ""
    files: Mapping[str, Path] = field(default_factory=dict[str, Path])
    indexes: Sequence[Index] = ()
    broken: Mapping[str, str] = field(default_factory=dict[str, str])
    names: frozenset[str] = frozenset()


def find(name: str | Path) -> tuple[Path, list[Folder], list[str]]:
    """Return the path of a name, its folders of weights, and the subdirectories with more weights that are left out.

    In a directory these are its safetensors files; if it has none (a diffusers pipeline), those of its
    subdirectories. Of a hub name they are the files in the local cache.

    Raises:
        InputError: The path does not exist, there are no safetensors files, or an index cannot be used.
    """
    path = Path(name).expanduser()
    try:
        if not path.exists() and _HUB_NAME.fullmatch(str(name)):
            path = _cached(str(name))
        if path.is_dir():
            return path, *_directory(path)
        if not path.exists():
            raise InputError(f"{name}: no such file or directory; name a safetensors file, an index or a directory")
        return path, [_file(path)], []
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror or error}") from error


def quantiser(folder: Folder) -> str:
    """Return the method of quantisation that the config beside some weight files names; empty without one."""
    file = next((path.parent / "config.json" for path in folder.files.values()), None)
    if file is None or not file.is_file():
        return ""
    try:
        config = read_json(file, LONGEST_INDEX)
    except InputError:
        return ""  # whether it can be read is not what a scan looks at
    asked = config.get("quantization_config") if isinstance(config, dict) else None
    method = asked.get("quant_method") if isinstance(asked, dict) else None
    return brief(method) if isinstance(method, str) else ""


def total_bytes(name: str | Path) -> int:
    """Return the bytes of the files that a scan of a name reads, for a progress bar.

    Raises:
        InputError: As for `find`.
    """
    files = (file for folder in find(name)[1] for file in folder.files.values())
    return sum(file.stat().st_size for file in files if file.is_file())


def _file(path: Path) -> Folder:
    if path.suffix == SUFFIX:
        return Folder(files={path.name: path})
    if path.suffix in PICKLES:
        raise InputError(f"{path} is a pickle, which can run code and is never read; convert it to safetensors")
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
            f"{path}: it holds no safetensors file, only pickles such as {brief(pickles[0])}, which can run code and "
            "are never read; convert them to safetensors"
        )
    raise InputError(
        f"{path}: neither it nor its subdirectories hold safetensors files; name a directory of saved weights"
    )


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
    """Read an index.

    Raises:
        InputError: It is not an index, or it names a file in another directory; the message is without the file's name.
    """
    try:
        raw: Any = read_json(file, LONGEST_INDEX, strict=True)
    except FileNotFoundError as error:
        raise InputError("it links to a file that does not exist") from error
    where: Any = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(where, dict) or not all(isinstance(shard, str) for shard in where.values()):
        raise InputError("it is not an index: want a weight_map from tensors to file names")
    outside = next(
        (s for s in dict.fromkeys(where.values()) if Path(s).name != s or "\\" in s or not s.endswith(SUFFIX)), None
    )
    if outside is not None:
        raise InputError(f"it names {brief(outside)}, which is not a safetensors file beside it and is not opened")
    metadata: Any = raw.get("metadata")
    total: Any = metadata.get("total_size") if isinstance(metadata, dict) else None
    return Index(file.name, where, total if type(total) in (int, float) else None)


def _cached(name: str) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.snapshot_download(name, local_files_only=True))
    except (errors.LocalEntryNotFoundError, errors.HFValidationError) as error:
        raise InputError(
            f"{name}: no such file or directory, and no model of that name in the local cache; download it with "
            f"`hf download {name}`, or name a directory"
        ) from error
