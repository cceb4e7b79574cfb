"""Measures the numbers in a part of a file."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np

from hfpatch.scanning.formats import FORMATS, WIDER, Format

CHUNK = 2**20
"""Bytes measured at a time: a second pass finds them in the processor's cache."""

_SIGNED = {bits: f"<i{bits // 8}" for bits in (8, 16, 32, 64)}

SAMPLE = 4096
"""Elements of a piece, spread over it, from which RMS and share of small values are computed."""

HALF = 65504.0
"""The largest number of float16; a cast of 65,520 or more gives infinity."""

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
    """Counts and magnitudes of the values of a tensor, or of a part of it.

    Attributes:
        nan, posinf, neginf: Number of elements that are NaN, +Inf and -Inf; both parts of a complex number count.
        beyond: Number of finite magnitudes above 65,504, in dtypes wider than float16.
        largest: Largest finite magnitude.
        nonzero: True if an element is not 0.
        squares, sampled: Sum of squares and number of the finite elements of a sample.
        tiny: Number of elements of the sample that are not 0 and become 0 in float16.
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
        """Add the values of another part of the same tensor."""
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
    """Measure consecutive pieces of one file, which is memory-mapped.

    Reading into a buffer would halve the speed. The price of the map: if the file is truncated between the check of its
    size and the read, or the disk fails, the process ends with SIGBUS.

    Raises:
        OSError: The file cannot be read, or was truncated.
    """
    start, end = pieces[0].start, pieces[-1].end
    first = start - start % mmap.ALLOCATIONGRANULARITY
    with file.open("rb", buffering=0) as handle:
        if handle.seek(0, 2) < end:
            raise OSError("the file was truncated while it was read")
        # not closed here: it is freed with the last of the arrays that use it
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
    """Return the bits of the largest finite magnitude, and count values that are not finite or above the limit.

    Read as signed integers, the largest is the largest positive number; read as unsigned ones, the largest is the
    negative number with the largest magnitude. So two passes find the extremes without a copy.
    """
    positive, negative = int(np.maximum.reduce(bits.view(_SIGNED[form.bits]))), int(np.maximum.reduce(bits))
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
    while gcd(step, len(bits)) > 1 and step > 1:  # else the sample may lie in a few columns only
        step += 2
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # signalling NaN are invalid
        numbers = _numbers(form, bits[::step])
        if found.nan or found.posinf or found.neginf:
            numbers = numbers[np.isfinite(numbers)]
        found.squares = float(numbers.dot(numbers))
    found.sampled = len(numbers)
    if small:
        found.tiny = int(np.count_nonzero(np.abs(numbers) <= TINY)) - int(np.count_nonzero(numbers == 0))


def _numbers(form: Format, bits: Any) -> Any:
    """Return the numbers of bits as float64; in 8-bit formats infinities become NaN."""
    if form.bits == 8:
        return _magnitudes(form)[bits]
    if (form.bits, form.mantissa) == (16, 7):
        return (bits.astype("<u4") << 16).view("<f4").astype("f8")
    return np.ascontiguousarray(bits).view(f"<f{form.bits // 8}").astype("f8")


@cache
def _magnitudes(form: Format) -> Any:
    """Return the magnitude of each value of an 8-bit format; NaN for what is not finite."""
    return np.array([form.value(m) if m <= form.finite else np.nan for m in range(128)] * 2)


@cache
def _most(form: Format, number: float) -> int:
    """Return the bits of the largest magnitude that is not above a number."""
    low, high = 0, form.finite
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if form.value(middle) <= number else (low, middle - 1)
    return low
