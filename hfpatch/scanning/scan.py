"""`hfpatch.scan`: every weight file under a path."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from hfpatch.errors import InputError
from hfpatch.scanning.header import Tensor, read_header
from hfpatch.scanning.layout import against_index, find, twice
from hfpatch.scanning.report import Census, Found, ScanReport

if TYPE_CHECKING:
    from hfpatch.scanning.values import Piece, Values

PIECE = 2**27
"""Bytes of a tensor that are read in one go; a multiple of every element's size."""

SMALL = 2**30
"""Below this many bytes one process is faster: another takes seconds to start."""

OUTLIER = 100.0
"""Times its tensor's RMS from which on a value is told."""


def scan(
    path: str | os.PathLike[str],
    *,
    processes: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> ScanReport:
    """Read every weight of safetensors files and say what is wrong with them. Nothing is written; no pickle is read.

    Memory does not grow with the files: they are read through a buffer of 8 MiB a process.

    Args:
        path: A safetensors file, a directory of them, or an index of shards.
        processes: How many read; by default one up to a GiB, else as many as there are cores, at most 8.
        progress: Told the bytes that were read since it was last told.

    Raises:
        InputError: There is no such path, it holds no safetensors, or its index is none.
    """
    root = Path(path)
    files, indexes = find(root)
    held: dict[str, list[Tensor]] = {}
    findings: list[Found] = []
    broken: set[str] = set()
    for file in files:
        try:
            held[file.name] = read_header(file)
        except InputError as error:
            broken.add(file.name)
            findings.append(Found("broken file", file.name, "", str(error).partition(": ")[2]))
    for index in indexes:
        findings += [Found(kind, name, "", text) for kind, name, text in against_index(index, held, broken)]
    findings += [Found(kind, name, "", text) for kind, name, text in twice(held, indexes)]
    notes: list[Found] = []
    places = {file.name: file for file in files}
    for (name, tensor), values in _measured(held, places, processes, progress).items():
        bad, good = _judged(name, tensor, values)
        findings += bad
        notes += good
    notes.sort(key=lambda f: f.kind)
    return ScanReport(str(root), len(files), tuple(findings), tuple(notes), _census(held))


def total_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes that a scan of a path would read, for a progress bar."""
    return sum(file.stat().st_size for file in find(Path(path))[0])


def _measured(
    held: dict[str, list[Tensor]],
    places: dict[str, Path],
    processes: int | None,
    progress: Callable[[int], None] | None,
) -> dict[tuple[str, Tensor], Values]:
    from hfpatch.scanning.values import Piece, Values, measure

    work: list[tuple[tuple[str, Tensor], Piece]] = []
    found: dict[tuple[str, Tensor], Values] = {}
    for name, tensors in held.items():
        for tensor in tensors:
            if tensor.size:
                found[name, tensor] = Values()
            for start in range(tensor.start, tensor.end, PIECE):
                piece = Piece(places[name], tensor.name, tensor.dtype, start, min(start + PIECE, tensor.end))
                work.append(((name, tensor), piece))
    total = sum(p.end - p.start for _, p in work)
    if processes is None:
        processes = 1 if total < SMALL else min(os.cpu_count() or 1, 8)
    lots = list(_lots(work))

    def take(lot: list[tuple[tuple[str, Tensor], Piece]], values: list[Values]) -> None:
        for (key, _), value in zip(lot, values, strict=True):
            found[key].add(value)
        if progress is not None:
            progress(sum(p.end - p.start for _, p in lot))

    if processes <= 1:
        for lot in lots:
            take(lot, measure([piece for _, piece in lot]))
        return found
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(measure, [piece for _, piece in lot]) for lot in lots]
        try:
            for lot, job in zip(lots, jobs, strict=True):
                take(lot, job.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return found


def _lots(work: list[tuple[tuple[str, Tensor], Piece]]) -> Iterator[list[tuple[tuple[str, Tensor], Piece]]]:
    """Pieces, some together so that each lot is of some size."""
    lot: list[tuple[tuple[str, Tensor], Piece]] = []
    size = 0
    for item in work:
        lot.append(item)
        size += item[1].end - item[1].start
        if size >= PIECE:
            yield lot
            lot, size = [], 0
    if lot:
        yield lot


def _judged(file: str, tensor: Tensor, values: Values) -> tuple[list[Found], list[Found]]:
    bad: list[Found] = []
    notes: list[Found] = []
    for kind, count in (("NaN", values.nan), ("Inf", values.inf)):
        if count:
            bad.append(Found(kind, file, tensor.name, f"{count:,} of {tensor.size:,} {tensor.dtype} values"))
    if values.beyond:
        text = f"{values.beyond:,} values up to {values.largest:.4g} that float16 cannot hold"
        notes.append(Found("beyond float16", file, tensor.name, text))
    if values.zero:
        notes.append(Found("all zero", file, tensor.name, f"{tensor.size:,} {tensor.dtype} values"))
    elif values.rms and values.largest > OUTLIER * values.rms:
        text = f"{values.largest:.4g} is {values.largest / values.rms:,.0f} times its RMS, {values.rms:.3g}"
        notes.append(Found("outlier", file, tensor.name, text))
    return bad, notes


def _census(held: dict[str, list[Tensor]]) -> dict[str, Census]:
    tensors: Counter[str] = Counter()
    parameters: dict[str, int] = defaultdict(int)
    sizes: dict[str, int] = defaultdict(int)
    for listed in held.values():
        for tensor in listed:
            tensors[tensor.dtype] += 1
            parameters[tensor.dtype] += tensor.size
            sizes[tensor.dtype] += tensor.end - tensor.start
    return {d: Census(n, parameters[d], sizes[d]) for d, n in tensors.most_common()}
