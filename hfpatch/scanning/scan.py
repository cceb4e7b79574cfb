"""`hfpatch.scan`: checks every weight file under a path."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hfpatch.errors import InputError
from hfpatch.given import FUNCTION, PATH, WHOLE, optional, want
from hfpatch.scanning import shards
from hfpatch.scanning.header import Tensor, read_header
from hfpatch.scanning.layout import Folder, find, quantiser
from hfpatch.scanning.result import Census, Found, ScanReport
from hfpatch.scanning.verdicts import codes, findings, notes, sorted_notes

if TYPE_CHECKING:
    from hfpatch.scanning.values import Piece, Values

LOT = 2**25
"""Largest number of bytes in a lot: one large piece of a tensor, or many small tensors."""

PIECES = 4096
"""Largest number of pieces in a lot, after which the caller hears of it: some 0.1 s of tiny tensors."""

SMALL = 2**32
"""Bytes below which other processes do not pay: they take a quarter of a second to start."""

MOST_PROCESSES = 4
"""Largest default number of processes: with more, memory or the disk is the limit."""


def scan(
    path: str | os.PathLike[str],
    *,
    model: object = None,
    processes: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> ScanReport:
    """Read every weight of safetensors files and report faults. Nothing is written, no pickle is read.

    Findings: NaN and infinities; files that are truncated or have a wrong header; contradictions between shards and
    their index (missing or unknown shards, missing, unknown or duplicate tensors, a wrong total size).

    Notes, which are no faults: in dtypes wider than float16, values beyond its 65,504 and tensors of which more than
    one value in 1,000 becomes 0 in it; tensors whose largest magnitude is more than 50 times their RMS; tensors of only
    zeros; files that no index names; integers that the config beside them says are codes of quantised weights.
    RMS and shares are computed from a sample of about 4,096 elements in each 32 MiB
    of a tensor; all else is exact. Integers, booleans, F8_E8M0 and dtypes below 8 bits are counted, and only
    checked for zeros.

    Memory does not grow with the files: each process takes some 65 MB, half of it for the part it reads; a header has
    at most 100 MB. torch is not imported.

    Args:
        path: A safetensors file, a directory of such files (or of directories of them, if it has none itself), an index
            of shards, or a hub name that is in the local cache.
        model: For a directory with a saved adapter: the transformers model, loaded or by name, directory or config, in
            which its tensors are tried. Nothing is loaded into it: PEFT's own loading runs on a copy without weights,
            for which torch is imported.
        processes: Number of processes that read; with 1 it is this process. Default: 1 below 4 GiB, else one per core,
            at most 4.
        progress: Called with the number of bytes read since the last call: after each header, and after at most 32 MiB
            or 4,096 tensors.

    Returns:
        The report.

    Raises:
        InputError: The path does not exist, holds no safetensors files, or is an index that cannot be used; or another
            argument cannot be used.
    """
    want("scan", path=(path, PATH), processes=(processes, optional(WHOLE)), progress=(progress, optional(FUNCTION)))
    if processes is not None and processes < 1:
        raise InputError(f"scan: want at least 1 as processes=, got {processes}")
    root, folders, left_out = find(os.fspath(path))
    found: list[Found] = []
    fits: list[Found] = []
    if model is not None:
        from hfpatch.scanning.adapter import adapter_findings

        found, fits = adapter_findings(root, model)
    noted = [Found("not scanned", f"{name}/", "", "holds more weights; scan it separately") for name in left_out]
    work: list[tuple[str, Path, Sequence[Tensor]]] = []
    for folder in folders:
        held, broken = _headers(folder, progress)
        found += [_labelled(f, folder) for f in (*broken, *shards.findings(folder, held))]
        noted += [_labelled(f, folder) for f in shards.notes(folder, held)]
        noted += [_labelled(f, folder) for f in codes((t for ts in held.values() for t in ts), quantiser(folder))]
        work += [(folder.label + name, folder.files[name], tensors) for name, tensors in held.items()]
    for file, tensor, values in _measured(work, processes, progress):
        if isinstance(values, str):
            found.append(Found("broken file", file, "", f"it could not be read completely: {values}"))
        else:
            found += findings(file, tensor, values)
            noted += notes(file, tensor, values)
    files = sum(len(folder.files) for folder in folders)
    census = _census(tensor for _, _, tensors in work for tensor in tensors)
    return ScanReport(str(root), files, tuple(found), (*fits, *sorted_notes(noted)), census)


def _headers(folder: Folder, progress: Callable[[int], None] | None) -> tuple[dict[str, list[Tensor]], list[Found]]:
    held: dict[str, list[Tensor]] = {}
    broken: list[Found] = []
    for name, file in folder.files.items():
        try:
            held[name] = read_header(file)
        except InputError as error:
            broken.append(Found("broken file", name, "", str(error)))
        else:
            if progress is not None and held[name]:
                progress(held[name][0].start)
    return held, broken


def _labelled(found: Found, folder: Folder) -> Found:
    return replace(found, file=folder.label + found.file)


def _measured(
    work: Sequence[tuple[str, Path, Sequence[Tensor]]], processes: int | None, progress: Callable[[int], None] | None
) -> Iterator[tuple[str, Tensor, Values | str]]:
    """Yield each tensor that has elements and its values; for a file that cannot be read, the reason, once."""
    from hfpatch.scanning.values import Values

    lots = [(name, file, lot) for name, file, tensors in work for lot in _lots(tensors)]
    if processes is None:
        small = sum(tensors[-1].end for _, _, tensors in work if tensors) < SMALL
        processes = 1 if small else min(_cores(), MOST_PROCESSES)
    unread: set[str] = set()
    so_far = Values()
    with _reading([(file, [piece for _, piece in lot]) for _, file, lot in lots], processes) as answers:
        for (name, _, lot), answer in zip(lots, answers, strict=True):
            if isinstance(answer, str):
                if name not in unread:
                    yield name, lot[0][0], answer
                unread.add(name)
                so_far = Values()
            else:
                for (tensor, piece), values in zip(lot, answer, strict=True):
                    so_far.add(values)
                    if piece.end == tensor.end:
                        if name not in unread:
                            yield name, tensor, so_far
                        so_far = Values()
            if progress is not None:
                progress(lot[-1][1].end - lot[0][1].start)


@contextmanager
def _reading(lots: Sequence[tuple[Path, Sequence[Piece]]], processes: int) -> Generator[Iterable[list[Values] | str]]:
    processes = min(processes, len(lots))
    if processes > 1:
        from hfpatch.scanning.worker import measured

        with measured(lots, processes) as answers:
            yield answers
    else:
        yield (_here(file, pieces) for file, pieces in lots)


def _here(file: Path, pieces: Sequence[Piece]) -> list[Values] | str:
    from hfpatch.scanning.values import measure

    try:
        return measure(file, pieces)
    except OSError as error:
        return error.strerror or str(error)


def _lots(tensors: Sequence[Tensor]) -> Iterator[list[tuple[Tensor, Piece]]]:
    """Split the bytes of a file into lots, in their order."""
    from hfpatch.scanning.values import Piece

    lot: list[tuple[Tensor, Piece]] = []
    size = 0
    for tensor in tensors:
        for start in range(tensor.start, tensor.end, LOT):
            piece = Piece(tensor.dtype, start, min(start + LOT, tensor.end))
            if lot and (size + piece.end - piece.start > LOT or len(lot) == PIECES):
                yield lot
                lot, size = [], 0
            lot.append((tensor, piece))
            size += piece.end - piece.start
    if lot:
        yield lot


def _census(tensors: Iterable[Tensor]) -> Mapping[str, Census]:
    counts: Counter[str] = Counter()
    parameters: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.dtype] += 1
        parameters[tensor.dtype] += tensor.size
        sizes[tensor.dtype] += tensor.end - tensor.start
    return {d: Census(counts[d], parameters[d], size) for d, size in sizes.most_common()}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
