"""Which weight files a path means, and whether they are what their index says."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfpatch.errors import InputError
from hfpatch.scanning.header import Tensor

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
INDEX = ".safetensors.index.json"


@dataclass(frozen=True)
class Index:
    """An index of shards: tensor -> file, and the bytes of all."""

    file: Path
    where: Mapping[str, str]
    total: int | None


def find(path: Path) -> tuple[list[Path], list[Index]]:
    """The weight files and indexes that a path means: a file, a directory or an index.

    Raises:
        InputError: There are none.
    """
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.name.endswith(".safetensors"))
        indexes = [_index(f) for f in sorted(path.iterdir()) if f.name.endswith(INDEX)]
        if not files and not indexes:
            pickles = sorted(f.name for f in path.iterdir() if f.suffix in PICKLES)
            found = (
                f"only {pickles[0]}, a pickle, which may run code and is never read; convert it first"
                if pickles
                else "none"
            )
            raise InputError(f"{path}: want safetensors files; found {found}")
        return files, indexes
    if path.name.endswith(".json") and path.is_file():
        index = _index(path)
        return [f for name in sorted(set(index.where.values())) if (f := path.parent / name).is_file()], [index]
    if path.is_file() and path.suffix in PICKLES:
        raise InputError(f"{path}: a pickle, which may run code and is never read; convert it to safetensors first")
    if not path.is_file():
        raise InputError(f"{path}: no such file or directory; want a safetensors file, an index or a directory of them")
    return [path], []


def _index(file: Path) -> Index:
    try:
        raw: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{file}: cannot be read as a JSON index of shards") from error
    where = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(where, dict) or not all(isinstance(v, str) for v in where.values()):
        raise InputError(f"{file}: want an index of shards with a weight_map of tensor names to file names")
    outside = next((v for v in where.values() if Path(v).name != v or v in ("", ".", "..")), None)
    if outside is not None:
        raise InputError(f"{file}: names the shard {outside!r}, which is no plain file name; nothing else is opened")
    metadata = raw.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return Index(file, where, total if isinstance(total, int) else None)


def against_index(index: Index, held: Mapping[str, Sequence[Tensor]], broken: set[str]) -> list[tuple[str, str, str]]:
    """What an index says that is not so: kind, file, sentence.

    Args:
        index: The index.
        held: Tensors by file name.
        broken: Names of files that could not be read.
    """
    found: list[tuple[str, str, str]] = []
    there = {t.name: name for name, tensors in held.items() for t in tensors}
    shards = set(index.where.values())
    for shard in sorted(shards - set(held) - broken):
        count = sum(v == shard for v in index.where.values())
        found.append(("missing shard", shard, f"{index.file.name} names it for {count:,} tensors; it is not there"))
    wrong = [(t, s) for t, s in index.where.items() if s in held and there.get(t) != s]
    for tensor, shard in wrong[:20]:
        place = f"it is in {there[tensor]}" if tensor in there else "it is nowhere"
        found.append(("missing tensor", shard, f"{index.file.name} says it holds {tensor!r}; {place}"))
    if len(wrong) > 20:
        found.append(
            ("missing tensor", index.file.name, f"and {len(wrong) - 20:,} more tensors that are not where it says")
        )
    unknown = [t for name in shards & set(held) for t in held[name] if t.name not in index.where]
    if unknown:
        found.append(
            ("unknown tensor", index.file.name, f"says nothing of {unknown[0].name!r} and {len(unknown) - 1:,} more")
        )
    size = sum(t.end - t.start for name in shards & set(held) for t in held[name])
    if index.total is not None and not (shards - set(held)) and size != index.total:
        found.append(("wrong size", index.file.name, f"says {index.total:,} bytes; the shards hold {size:,}"))
    return found


def twice(held: Mapping[str, Sequence[Tensor]], indexes: Sequence[Index]) -> list[tuple[str, str, str]]:
    """Tensors that several shards of one index hold."""
    found: list[tuple[str, str, str]] = []
    for index in indexes:
        places: dict[str, list[str]] = defaultdict(list)
        for name in sorted(set(index.where.values()) & set(held)):
            for tensor in held[name]:
                places[tensor.name].append(name)
        for tensor, files in places.items():
            if len(files) > 1:
                found.append(("duplicate tensor", files[1], f"{tensor!r} is also in {files[0]}"))
    return found
