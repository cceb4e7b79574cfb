"""The header of a safetensors file: read with care, since it may come from anywhere."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfpatch.errors import InputError

LONGEST = 100_000_000
"""Bytes of a header, at most; the format's own limit."""

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits of one element, by the format's name of its dtype."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file: its bytes are `[start, end)` from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def read_header(path: Path) -> list[Tensor]:
    """The tensors of a file, in the order of their bytes.

    Raises:
        InputError: The file is truncated, its header lies, or it is none of safetensors; one sentence.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            if len(first) < 8:
                raise InputError(f"{path.name}: {size} bytes, too short for a safetensors file")
            length = int.from_bytes(first, "little")
            if length > LONGEST:
                raise InputError(
                    f"{path.name}: its header would be {length:,} bytes and may be {LONGEST:,}; no safetensors file"
                )
            if 8 + length > size:
                raise InputError(f"{path.name}: truncated, its header needs {8 + length:,} bytes and it has {size:,}")
            raw = file.read(length)
    except OSError as error:
        raise InputError(f"{path.name}: cannot be read: {error.strerror}") from error
    entries = _object(raw, path)
    entries.pop("__metadata__", None)
    tensors = [_tensor(name, entry, 8 + length, path) for name, entry in entries.items()]
    tensors.sort(key=lambda t: (t.start, t.end))
    place = 8 + length
    for tensor in tensors:
        if tensor.start != place:
            what = (
                "overlaps the one before" if tensor.start < place else f"leaves {tensor.start - place:,} bytes unused"
            )
            raise InputError(f"{path.name}: its header lies: {tensor.name!r} {what}")
        place = tensor.end
    if place > size:
        raise InputError(f"{path.name}: truncated, its tensors need {place:,} bytes and it has {size:,}")
    if place < size:
        raise InputError(
            f"{path.name}: {size - place:,} bytes follow its last tensor, of which the header says nothing"
        )
    return tensors


def _object(raw: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = next(k for i, (k, _) in enumerate(pairs) if any(k == other for other, _ in pairs[:i]))
            raise InputError(f"{path.name}: its header names {twice!r} twice")
        return found

    try:
        if not raw.startswith(b"{"):
            raise InputError(f"{path.name}: its header is no JSON object; no safetensors file")
        entries = json.loads(raw.decode(), object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path.name}: its header is no JSON object; no safetensors file") from error
    except RecursionError as error:
        raise InputError(f"{path.name}: its header is nested too deep") from error
    return entries


def _tensor(name: str, entry: Any, base: int, path: Path) -> Tensor:
    keys = {"dtype", "shape", "data_offsets"}
    if not isinstance(entry, dict) or set(entry) != keys:
        raise InputError(f"{path.name}: its header says of {name!r} no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in BITS:
        raise InputError(f"{path.name}: {name!r} has the dtype {dtype!r}, which the format does not know")
    whole = isinstance(shape, list) and isinstance(offsets, list) and all(type(n) is int for n in [*shape, *offsets])
    if not whole or len(offsets) != 2 or min([*shape, *offsets]) < 0 or max([*shape, *offsets]) >= 2**63:
        raise InputError(f"{path.name}: {name!r} has a shape or data_offsets that are no counts")
    start, end = offsets
    bits = math.prod(shape) * BITS[dtype]
    if bits % 8 or end - start != bits // 8:
        raise InputError(
            f"{path.name}: its header lies: {name!r}, {dtype} {shape}, takes {bits / 8:,.0f} bytes, not {end - start:,}"
        )
    return Tensor(name, dtype, tuple(shape), base + start, base + end)
