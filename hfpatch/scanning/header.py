"""Reads the header of a safetensors file, which may be untrusted.

It is parsed entry by entry, not by one `json.loads`: 100 MB of nested lists would become gigabytes of objects. Headers
accepted here are accepted by the safetensors library; a few unusual ones are refused only here.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hfpatch.errors import InputError
from hfpatch.scanning.formats import BITS
from hfpatch.untrusted.ordinary import brief

LONGEST = 100_000_000
"""Largest header in bytes; the format's own limit."""

MOST = 2**19
"""Largest number of tensors in a file: the largest models have some 300,000 in all their shards."""

ENTRY = 4096
"""Largest size in bytes of a name, and of a tensor's entry."""

_BLANK = re.compile(rb"[ \t\n\r]*+")
_ESCAPE = (  # a high surrogate only before a low one
    rb"\\(?:[\"\\/bfnrt]|u(?:(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
    rb"|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))"
)
_STRETCH = re.compile(rb"[^\"\\\x00-\x1f]*+(?:" + _ESCAPE + rb"[^\"\\\x00-\x1f]*+){0,1000}+")
_COUNT = rb"(?:0|[1-9]\d{0,17})"
_WRITTEN = re.compile(  # an entry as the safetensors library writes it
    rb'\{"dtype":"([A-Z0-9_]+)","shape":\[((?:%b(?:,%b){0,15})?)\],"data_offsets":\[(%b),(%b)\]\}' % ((_COUNT,) * 4)
)
_NOT_JSON = "its header is not a JSON object of tensors, so it is not a safetensors file; name another file"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file: `size` is its number of elements; its bytes are `[start, end)` of the file."""

    name: str
    dtype: str
    size: int
    start: int
    end: int


def read_header(path: Path) -> list[Tensor]:
    """Return the tensors of a file in the order of their bytes, which are checked to fill the file without gaps.

    Time and memory grow with the header, which has at most 100 MB; the rest of the file is not read.

    Raises:
        InputError: The file is truncated, its header is wrong, or it is not a safetensors file; the message is without
            the file's name.
    """
    try:
        if not path.is_file():
            raise InputError("it is not a regular file" if path.exists() else "it links to a file that does not exist")
        with path.open("rb") as file:
            size = path.stat().st_size
            raw = _read(file, size)
    except OSError as error:
        raise InputError(f"it cannot be read: {error.strerror or error}") from error
    _check_utf8(raw)
    base = 8 + len(raw)
    tensors = sorted(_tensors(raw, base), key=lambda t: (t.start, t.end))
    place = base
    for tensor in tensors:
        if tensor.start < place:
            raise InputError(f"its header is wrong: {brief(tensor.name)} overlaps the tensor before it")
        if tensor.start > place:
            unused = tensor.start - place
            raise InputError(f"its header is wrong: {unused:,} bytes before {brief(tensor.name)} belong to no tensor")
        place = tensor.end
    if place > size:
        raise InputError(f"it is truncated: its tensors end at byte {place:,} and it has {size:,}; download it again")
    if place < size:
        raise InputError(f"{size - place:,} bytes after its last tensor belong to no tensor")
    return tensors


def _read(file: BinaryIO, size: int) -> bytes:
    first = file.read(8)
    if len(first) < 8:
        raise InputError(f"it has {size} bytes, too few for a safetensors file")
    if first == b"version ":
        raise InputError("it is a Git LFS pointer, not the file it points to; run `git lfs pull`")
    length = int.from_bytes(first, "little")
    start = file.read(1)
    if start and start != b"{":
        raise InputError(_NOT_JSON)
    if length > LONGEST:
        raise InputError(
            f"its header would have {length:,} bytes, more than the {LONGEST:,} of the format; "
            "it is damaged, or not a safetensors file"
        )
    if 8 + length > size:
        raise InputError(
            f"it is truncated: its header ends at byte {8 + length:,} and it has {size:,}; download it again"
        )
    file.seek(8)
    raw = file.read(length)
    if len(raw) < length:
        raise InputError("it was truncated while it was read")
    return raw


def _check_utf8(raw: bytes) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    step = 2**20
    try:
        for start in range(0, len(raw), step):
            decoder.decode(raw[start : start + step], final=start + step >= len(raw))
    except UnicodeDecodeError as error:
        raise InputError("its header is not UTF-8; it is damaged, or not a safetensors file") from error


def _tensors(raw: bytes, base: int) -> Iterator[Tensor]:
    if not raw.startswith(b"{"):
        raise InputError(_NOT_JSON)
    seen: set[str] = set()
    for name, place in (walk := _Members(raw, 0)):
        if name in seen:
            raise InputError(f"its header names {brief(name)} twice")
        if len(seen) > MOST:
            raise InputError(f"its header names more than {MOST:,} tensors")
        seen.add(name)
        if name == "__metadata__":
            walk.place = _after_metadata(raw, place)
        else:
            tensor, walk.place = _tensor(name, raw, place, base)
            yield tensor
    if _blank(raw, walk.place) != len(raw):
        raise InputError(_NOT_JSON)


class _Members:
    """Iterates over the names in a JSON object and the places of their values; the caller sets `place` to each end."""

    def __init__(self, raw: bytes, place: int) -> None:
        self.raw, self.place = raw, place

    def __iter__(self) -> Iterator[tuple[str, int]]:
        raw = self.raw
        start = _expect(raw, self.place, b"{")
        if raw[start : start + 1] == b"}":
            self.place = start + 1
            return
        while True:
            end = _after_string(raw, start)
            if end - start > ENTRY:
                raise InputError(f"its header holds a name of {end - start:,} bytes")
            text = raw[start + 1 : end - 1]
            name = json.loads(raw[start:end]) if b"\\" in text else text.decode()
            yield name, _expect(raw, end, b":")
            start = _blank(raw, self.place)
            if raw[start : start + 1] == b"}":
                self.place = start + 1
                return
            start = _expect(raw, start, b",")


def _after_metadata(raw: bytes, place: int) -> int:
    walk = _Members(raw, place)
    for _, start in walk:
        walk.place = _after_string(raw, start)
    return walk.place


def _blank(raw: bytes, place: int) -> int:
    if raw[place : place + 1] > b" ":
        return place
    match = _BLANK.match(raw, place)
    return match.end() if match else place


def _expect(raw: bytes, place: int, sign: bytes) -> int:
    """Return the place after a character and the blanks around it."""
    place = _blank(raw, place)
    if raw[place : place + 1] != sign:
        raise InputError(_NOT_JSON)
    return _blank(raw, place + 1)


def _after_string(raw: bytes, place: int) -> int:
    if raw[place : place + 1] != b'"':
        raise InputError(_NOT_JSON)
    place += 1
    while match := _STRETCH.match(raw, place):  # in parts: a long repeat costs re memory
        if raw[match.end() : match.end() + 1] == b'"':
            return match.end() + 1
        if match.end() == place:
            break
        place = match.end()
    raise InputError(_NOT_JSON)


def _tensor(name: str, raw: bytes, place: int, base: int) -> tuple[Tensor, int]:
    """Return the tensor that an entry of the header describes, and the place after the entry."""
    if written := _WRITTEN.match(raw, place, place + ENTRY):
        kind, counts, *ends = written.groups()
        dtype, shape, offsets = kind.decode(), [int(n) for n in counts.split(b",") if n], [int(n) for n in ends]
        end = written.end()
    else:
        dtype, shape, offsets, end = _unusual(name, raw, place)
    if dtype not in BITS:
        raise InputError(f"{brief(name)} has the dtype {brief(dtype)}, which the format does not have")
    size = 1
    for count in shape:
        size *= count
        if size * BITS[dtype] >= 2**63:
            raise InputError(f"its header is wrong: {brief(name)} would have more elements than fit in memory")
    start, stop = offsets
    if (stop - start) * 8 != size * BITS[dtype]:
        raise InputError(
            f"its header is wrong: {brief(name)}, {dtype} {brief(str(shape))}, needs {size * BITS[dtype] / 8:,.0f} "
            f"bytes, but its data_offsets span {stop - start:,}"
        )
    return Tensor(name, dtype, size, base + start, base + stop), end


def _unusual(name: str, raw: bytes, place: int) -> tuple[str, list[int], list[int], int]:
    """Return dtype, shape and offsets of an entry that JSON allows, and the place after it."""
    end = raw.find(b"}", place, place + ENTRY) + 1
    text = raw[place:end]
    try:
        entry: Any = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise InputError(f"its header says of {brief(name)} no dtype, shape and data_offsets") from error
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise InputError(f"its header says of {brief(name)} no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise InputError(f"{brief(name)} has the dtype {brief(str(dtype))}, which the format does not have")
    counts = isinstance(shape, list) and isinstance(offsets, list) and all(type(n) is int for n in shape + offsets)
    if not counts or len(offsets) != 2 or b"-" in text or max(shape + offsets) >= 2**63:
        raise InputError(f"{brief(name)} has a shape or data_offsets that are not counts")
    return dtype, shape, offsets, end


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("a key twice")
    return found
