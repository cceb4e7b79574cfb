"""Initial values: functions of the tensor they replace, seeded, which do not use torch's global random state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from hfpatch.errors import InputError


def check_draw(std: Any, seed: Any, input_rms: Any) -> None:
    """Check the options of a draw; `std` may be None.

    Raises:
        InputError: `std` or `input_rms` is not a positive number, or `seed` is not an integer from 0 to 2**62 - 1.
    """
    for name, value in (("std", std), ("input_rms", input_rms)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (number and 0 < value < math.inf) and (value is not None or name != "std"):
            raise InputError(f"options: projection-init: {name}: want a positive number, got {value!r}")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**62:
        raise InputError(f"options: projection-init: seed: want an integer from 0 to 2**62 - 1, got {seed!r}")


@dataclass(frozen=True)
class Normal:
    """Independent draws from a normal distribution with mean 0.

    They are made on the CPU in float32 and then cast, so a seed gives the same tensor on every device.

    Args:
        std: Standard deviation.
        seed: Seed of the generator.
    """

    std: float
    seed: int = 0

    def __call__(self, current: torch.Tensor) -> torch.Tensor:
        """Return new values with shape, dtype and device of `current`, which is not changed."""
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.empty(current.shape, dtype=torch.float32, device="cpu")
        drawn.normal_(0.0, self.std, generator=generator)
        return drawn.to(dtype=current.dtype, device=current.device)

    def __str__(self) -> str:
        return f"normal(0, {self.std:g}) seed {self.seed}"


@dataclass(frozen=True)
class Zeros:
    """Zeros."""

    def __call__(self, current: torch.Tensor) -> torch.Tensor:
        """Return zeros with shape, dtype and device of `current`, which is not changed."""
        return torch.zeros_like(current, requires_grad=False)

    def __str__(self) -> str:
        return "zeros"
