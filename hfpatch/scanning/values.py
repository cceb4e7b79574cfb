"""The numbers of one piece of a file, read through one buffer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

BUFFER = 2**23
"""Bytes read at a time."""

SAMPLE = 4096
"""Elements of a buffer that the RMS is taken from."""

HALF = 65504.0

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
"""Dtypes whose values are looked at; of the others only whether all bytes are 0."""


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, `[start, end)` of a file."""

    file: Path
    tensor: str
    dtype: str
    start: int
    end: int


@dataclass
class Values:
    """What a tensor, or a part of it, holds.

    Attributes:
        nan, inf: Elements that are.
        beyond: Finite elements above 65,504, which float16 turns into infinities.
        largest: Largest finite magnitude.
        zero: Every element is 0.
        squares, sampled: Sum of the squares of a sample, and its size.
    """

    nan: int = 0
    inf: int = 0
    beyond: int = 0
    largest: float = 0.0
    zero: bool = True
    squares: float = 0.0
    sampled: int = 0

    def add(self, other: Values) -> None:
        """Join another part of the same tensor."""
        self.nan += other.nan
        self.inf += other.inf
        self.beyond += other.beyond
        self.largest = max(self.largest, other.largest)
        self.zero = self.zero and other.zero
        self.squares += other.squares
        self.sampled += other.sampled

    @property
    def rms(self) -> float:
        """Root of the mean square, of the sample."""
        return math.sqrt(self.squares / self.sampled) if self.sampled else 0.0


def measure(pieces: list[Piece]) -> list[Values]:
    """Read pieces one after the other; OSError if a file became shorter since its header was read."""
    torch.set_num_threads(1)
    buffer = bytearray(BUFFER)
    return [_piece(piece, buffer) for piece in pieces]


def _piece(piece: Piece, buffer: bytearray) -> Values:
    found = Values()
    dtype = DTYPES.get(piece.dtype)
    with piece.file.open("rb", buffering=0) as file:
        file.seek(piece.start)
        left = piece.end - piece.start
        view = memoryview(buffer)
        while left:
            filled = 0
            want = min(left, BUFFER)
            while filled < want:
                got = file.readinto(view[filled:want])
                if not got:
                    raise OSError(f"{piece.file.name} became shorter while it was read")
                filled += got
            left -= want
            if dtype is None:
                found.zero = found.zero and not bool(torch.frombuffer(buffer, dtype=torch.uint8, count=want).any())
            else:
                found.add(_values(torch.frombuffer(buffer, dtype=dtype, count=want // dtype.itemsize)))
    return found


def _values(x: torch.Tensor) -> Values:
    if x.dtype.itemsize == 1:
        x = x.float()
    low, high = (float(v) for v in torch.aminmax(x))
    nan = inf = 0
    if not (math.isfinite(low) and math.isfinite(high)):
        nan, inf = int(x.isnan().sum()), int(x.isinf().sum())
        finite = x[x.isfinite()]
        low, high = (float(v) for v in torch.aminmax(finite)) if finite.numel() else (0.0, 0.0)
    largest = max(-low, high)
    beyond = int(((x.abs() > HALF) & x.isfinite()).sum()) if largest > HALF else 0
    sample = x[:: max(1, x.numel() // SAMPLE) | 1].double()
    sample = sample[sample.isfinite()]
    return Values(
        nan, inf, beyond, largest, largest == 0 and not nan and not inf, float(sample @ sample), sample.numel()
    )
