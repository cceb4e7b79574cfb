"""The number formats of safetensors files, as bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits of one element, by name of the dtype in safetensors."""


@dataclass(frozen=True)
class Format:
    """A floating-point format. Without the sign bit, bits read as integers have the order of the magnitudes.

    Attributes:
        bits, mantissa, bias: Bits of a value, bits of its mantissa, and the bias of its exponent.
        finite: Bits of the largest finite magnitude.
        infinite: True if the next bits are infinity; all above are NaN.
        unsigned_zero: True if NaN has the bits of -0, and no others.
    """

    bits: int
    mantissa: int
    bias: int
    finite: int
    infinite: bool = True
    unsigned_zero: bool = False

    @property
    def sign(self) -> int:
        """The sign bit; the bits below it are the magnitude."""
        return 1 << (self.bits - 1)

    def value(self, magnitude: int) -> float:
        """Return the number of a finite magnitude's bits."""
        exponent, fraction = magnitude >> self.mantissa, magnitude & ((1 << self.mantissa) - 1)
        if exponent:
            return math.ldexp((1 << self.mantissa) + fraction, exponent - self.bias - self.mantissa)
        return math.ldexp(fraction, 1 - self.bias - self.mantissa)


FORMATS: Mapping[str, Format] = {
    "F64": Format(64, 52, 1023, 0x7FEF_FFFF_FFFF_FFFF),
    "F32": Format(32, 23, 127, 0x7F7F_FFFF),
    "C64": Format(32, 23, 127, 0x7F7F_FFFF),  # real and imaginary part, each a value
    "F16": Format(16, 10, 15, 0x7BFF),
    "BF16": Format(16, 7, 127, 0x7F7F),
    "F8_E5M2": Format(8, 2, 15, 0x7B),
    "F8_E4M3": Format(8, 3, 7, 0x7E, infinite=False),
    "F8_E5M2FNUZ": Format(8, 2, 16, 0x7F, infinite=False, unsigned_zero=True),
    "F8_E4M3FNUZ": Format(8, 3, 8, 0x7F, infinite=False, unsigned_zero=True),
}
"""Dtypes whose values are measured; the others are only checked for zeros."""

WIDER = frozenset({"F64", "F32", "C64", "BF16"})
"""Dtypes with a wider range than float16."""
