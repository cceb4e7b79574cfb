"""Checks the shards of a directory against their index."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from hfpatch.scanning.header import Tensor
from hfpatch.scanning.layout import SUFFIX, Folder, Index
from hfpatch.scanning.result import Found
from hfpatch.untrusted.ordinary import brief

TOLD = 20
"""Number of tensors that are named for each kind of fault; the others are counted."""

_SHARD = re.compile(r"(.+?)-(\d{1,9})-of-(\d{1,9})((?:\.[^.]+)?)\.safetensors")

Held = Mapping[str, Sequence[Tensor]]
"""Tensors of the files that could be read, by file name."""


def findings(folder: Folder, held: Held) -> list[Found]:
    """Return the contradictions between files and indexes; files are named without the folder's label."""
    found = [Found("broken index", name, "", text) for name, text in folder.broken.items()]
    for index in folder.indexes:
        found += _against(index, folder, held)
    if not folder.broken:
        found += _without_index(folder, held)
    return found


def notes(folder: Folder, held: Held) -> list[Found]:
    """Return the notes, which are no faults: files that no index names beside indexed ones, files without a tensor."""
    named = {shard for index in folder.indexes for shard in index.where.values()}
    beside = [name for name in folder.files if folder.indexes and name not in named and not _SHARD.fullmatch(name)]
    found = [
        Found("beside shards", name, "", "no index names it; loaders differ in which files they load")
        for name in beside
    ]
    return found + [
        Found("no tensor", name, "", "its header names no tensor") for name, tensors in held.items() if not tensors
    ]


def _against(index: Index, folder: Folder, held: Held) -> Iterator[Found]:
    counts = Counter(index.where.values())
    named = set(counts)
    for shard in sorted(named - folder.names):
        yield Found("missing shard", shard, "", f"not found; by {index.name} it holds {_tensors(counts[shard])}")
    here = named & set(held)
    places: dict[str, list[str]] = defaultdict(list)
    for shard in sorted(here):
        for tensor in held[shard]:
            places[tensor.name].append(shard)
    wrong = [(tensor, shard) for tensor, shard in index.where.items() if shard in here and shard not in places[tensor]]
    for tensor, shard in wrong[:TOLD]:
        where = f"it is in {brief(places[tensor][0])}" if places[tensor] else "no shard that is here has it"
        yield Found("missing tensor", shard, tensor, f"by {index.name} it is in this shard; {where}")
    if len(wrong) > TOLD:
        yield Found("missing tensor", index.name, "", f"{_tensors(len(wrong) - TOLD)} more are not in their shards")
    double = [(tensor, shards) for tensor, shards in places.items() if len(shards) > 1]
    yield from _doubled(double, index.name)
    unknown = [(t.name, shard) for shard in sorted(here) for t in held[shard] if t.name not in index.where]
    for tensor, shard in unknown[:TOLD]:
        yield Found("unknown tensor", shard, tensor, f"{index.name} does not name it, so it is not loaded")
    if len(unknown) > TOLD:
        yield Found("unknown tensor", index.name, "", f"{_tensors(len(unknown) - TOLD)} more are not in it")
    alike = {match.group(1, 4) for name in named if (match := _SHARD.fullmatch(name))}
    for name in sorted(folder.names - named):
        if (match := _SHARD.fullmatch(name)) and match.group(1, 4) in alike:
            yield Found("unknown shard", name, "", f"{index.name} does not name it, so it is not loaded")
    size = sum(t.end - t.start for shard in here for t in held[shard])
    if index.total is not None and here == named and size != index.total:
        yield Found("wrong size", index.name, "", f"says {index.total:,.0f} bytes; its shards hold {size:,}")


def _without_index(folder: Folder, held: Held) -> Iterator[Found]:
    """Yield findings about files that are numbered as shards and that no index covers."""
    named = {shard for index in folder.indexes for shard in index.where.values()}
    known = {match.group(1, 4) for name in named if (match := _SHARD.fullmatch(name))}
    sets: dict[tuple[str, str, int], dict[int, str]] = defaultdict(dict)
    for name in sorted(folder.names - named):
        if (match := _SHARD.fullmatch(name)) and match.group(1, 4) not in known:
            sets[match[1], match[4], int(match[3])][int(match[2])] = name
    for (stem, variant, count), shards in sets.items():
        what = f"{stem}{variant}{SUFFIX}.index.json"
        yield Found(
            "missing index",
            what,
            "",
            f"not found; there are {len(shards):,} shards such as {next(iter(shards.values()))}",
        )
        missing = [n for n in range(1, min(count, max(shards) + TOLD) + 1) if n not in shards]
        for number in missing[:TOLD]:
            name = f"{stem}-{number:05d}-of-{count:05d}{variant}{SUFFIX}"
            yield Found("missing shard", name, "", "not found; by the numbers of the other shards it should exist")
        if count - len(shards) > len(missing[:TOLD]):
            rest = count - len(shards) - len(missing[:TOLD])
            yield Found("missing shard", what, "", f"{rest:,} more shards should exist by their numbers")
        places: dict[str, list[str]] = defaultdict(list)
        for shard in shards.values():
            for tensor in held.get(shard, ()):
                places[tensor.name].append(shard)
        yield from _doubled([(tensor, files) for tensor, files in places.items() if len(files) > 1], what)


def _doubled(double: Sequence[tuple[str, Sequence[str]]], name: str) -> Iterator[Found]:
    for tensor, shards in double[:TOLD]:
        yield Found("duplicate tensor", shards[1], tensor, f"it is also in {brief(shards[0])}")
    if len(double) > TOLD:
        yield Found("duplicate tensor", name, "", f"{_tensors(len(double) - TOLD)} more are in several shards")


def _tensors(count: int) -> str:
    return f"{count:,} tensor{'' if count == 1 else 's'}"
