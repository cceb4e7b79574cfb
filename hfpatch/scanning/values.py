"""The numbers of one stretch of a file."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np

from hfpatch.scanning.formats import FORMATS, WIDER, Format

CHUNK = 2**20
"""Bytes looked at together: the second look finds them in the processor's cache."""

SAMPLE = 4096
"""Elements of a piece, spread over it, that the RMS and the share of small values are taken from."""

HALF = 65504.0
"""The largest number of float16; from 65,520 on a cast makes infinity."""

TINY = 2.0**-25
"""The largest magnitude that a cast to float16 turns into 0."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor: bytes `[start, end)` of its file."""

    dtype: str
    start: int
    end: int


@dataclass(slots=True)
class Values:
    """What a tensor, or a part of it, holds.

    Attributes:
        nan, posinf, neginf: Elements that are; each part of a complex number counts.
        beyond: Finite magnitudes above 65,504, in dtypes that have such.
        largest: Largest finite magnitude.
        nonzero: Whether an element is not 0.
        squares, sampled: Sum of the squares of the finite elements of a sample, and how many they are.
        tiny: Elements of the sample that are not 0 and become 0 in float16.
    """

    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    beyond: int = 0
    largest: float = 0.0
    nonzero: bool = False
    squares: float = 0.0
    sampled: int = 0
    tiny: int = 0

    def add(self, other: Values) -> None:
        """Join another part of the same tensor."""
        self.nan += other.nan
        self.posinf += other.posinf
        self.neginf += other.neginf
        self.beyond += other.beyond
        self.largest = max(self.largest, other.largest)
        self.nonzero |= other.nonzero
        self.squares += other.squares
        self.sampled += other.sampled
        self.tiny += other.tiny


def measure(file: Path, pieces: Sequence[Piece]) -> list[Values]:
    """Look at pieces of one file that follow each other without holes; they are mapped together, not read.

    A buffer would cost half the speed. What a map costs: a file that becomes shorter in the milliseconds between the
    check and the look, or a disk that fails, ends the process.

    Raises:
        OSError: The file cannot be read, or became shorter.
    """
    start, end = pieces[0].start, pieces[-1].end
    first = start - start % mmap.ALLOCATIONGRANULARITY
    with file.open("rb", buffering=0) as handle:
        if handle.seek(0, 2) < end:
            raise OSError("it became shorter while it was read")
        # not closed: the arrays over it keep it, and it goes with the last of them
        area: Any = mmap.mmap(handle.fileno(), end - first, access=mmap.ACCESS_READ, offset=first)
    data = np.frombuffer(area, np.uint8)
    return [_piece(piece, data[piece.start - first : piece.end - first]) for piece in pieces]


def _piece(piece: Piece, data: Any) -> Values:
    found = Values()
    form = FORMATS.get(piece.dtype)
    if form is None:
        found.nonzero = any(data[at : at + CHUNK].max() for at in range(0, len(data), CHUNK))
        return found
    bits: Any = data.view(f"<u{form.bits // 8}")
    limit = _most(form, HALF) if piece.dtype in WIDER else form.finite
    step = CHUNK * 8 // form.bits
    top = 0
    for at in range(0, len(bits), step):
        top = max(top, _chunk(form, bits[at : at + step], limit, found))
    found.largest = form.value(top)
    found.nonzero = bool(top or found.nan or found.posinf or found.neginf)
    _sample(form, bits, found, small=piece.dtype in WIDER)
    return found


def _chunk(form: Format, bits: Any, limit: int, found: Values) -> int:
    """Bits of the largest finite magnitude; what is not finite or beyond the limit is counted.

    The largest signed integer is the positive number of the largest magnitude, the largest unsigned one the negative
    number of the largest: two looks, and nothing is written.
    """
    signed = bits.view(bits.dtype.str.replace("u", "i"))
    positive, negative = int(signed.max()), int(bits.max())
    top = max(positive, negative - form.sign, 0)
    if form.unsigned_zero and negative >= form.sign:
        found.nan += int(np.count_nonzero(bits == form.sign))
    if top <= limit:
        return top
    magnitude: Any = bits & (form.sign - 1)
    if top > form.finite:
        bad = magnitude > form.finite
        infinite = magnitude == form.finite + 1 if form.infinite else np.zeros_like(bad)
        minus = int(np.count_nonzero(infinite & (bits >= form.sign)))
        found.neginf += minus
        found.posinf += int(np.count_nonzero(infinite)) - minus
        found.nan += int(np.count_nonzero(bad)) - int(np.count_nonzero(infinite))
        magnitude = np.where(bad, 0, magnitude)
    found.beyond += int(np.count_nonzero(magnitude > limit))
    return int(magnitude.max())


def _sample(form: Format, bits: Any, found: Values, *, small: bool) -> None:
    step = max(1, len(bits) // SAMPLE | 1)
    while gcd(step, len(bits)) > 1 and step > 1:  # else all of it may lie in a few columns
        step += 2
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # signalling NaN are
        numbers = np.abs(_numbers(form, bits[::step]))
        numbers = numbers[np.isfinite(numbers)]
        found.squares = float(np.square(numbers).sum())
    found.sampled = len(numbers)
    found.tiny = int(np.count_nonzero((numbers > 0) & (numbers <= TINY))) if small else 0


def _numbers(form: Format, bits: Any) -> Any:
    """float64 numbers of bits; NaN for what is not finite, of formats that numpy has none for."""
    if form.bits == 8:
        magnitudes = [form.value(m) if m <= form.finite else np.nan for m in range(128)]
        return np.array(magnitudes * 2)[bits]
    if (form.bits, form.mantissa) == (16, 7):
        return (bits.astype("<u4") << 16).view("<f4").astype("f8")
    return np.ascontiguousarray(bits).view(f"<f{form.bits // 8}").astype("f8")


def _most(form: Format, number: float) -> int:
    """Bits of the largest magnitude up to a number."""
    low, high = 0, form.finite
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if form.value(middle) <= number else (low, middle - 1)
    return low
