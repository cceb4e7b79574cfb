"""Statistics of a tensor by plain torch operations, and the columns that every way of measuring fills."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

COLUMNS = (
    "nan", "posinf", "neginf", "zeros", "under_float16", "under_e5m2", "under_e4m3", "min", "max", "sum", "squares",
    "counted",
)  # fmt: skip
"""Of a row. `under_*`: elements, not 0, that round to 0 in that dtype. `min`, `max`, `sum`, `squares`: of the finite
elements, inf and -inf where there is none. `counted`: elements behind zeros, under_*, sum and squares."""

THRESHOLDS = (2.0**-25, 2.0**-17, 2.0**-10)
"""Largest magnitudes that round to 0 in float16, float8_e5m2 and float8_e4m3fn: half of their smallest numbers."""


class DeviceRows:
    """By plain torch operations, for `statistics_lots.Lots` without Triton: several passes, read together."""

    def __init__(self) -> None:
        self._rows: list[torch.Tensor] = []

    def extend(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `statistics_lots.Measured`."""
        self._rows += map(self._row, tensors)

    def _row(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = flattened(tensor)
        x = flat if flat.dtype == torch.float64 else flat.float()
        if x.numel() == 0:
            row = torch.zeros(len(COLUMNS), dtype=x.dtype, device=x.device)
            row[7].fill_(math.inf)
            row[8].fill_(-math.inf)
            return row
        finite = x.isfinite()
        clean = torch.where(finite, x, 0)
        size = clean.abs()
        small = [(size <= t).sum() - (size == 0).sum() for t in THRESHOLDS]
        zeros = (size == 0).sum() - (~finite).sum()
        figures = [
            x.isnan().sum(),
            (x == math.inf).sum(),
            (x == -math.inf).sum(),
            zeros,
            *small,
            torch.where(finite, x, math.inf).min(),
            torch.where(finite, x, -math.inf).max(),
            clean.sum(),
            (clean * clean).sum(),
            finite.sum(),
        ]
        return torch.stack([f.to(x.dtype) for f in figures])

    def read(self) -> torch.Tensor:
        """See `statistics_lots.Measured`."""
        return self.stacked().cpu().double()

    def stacked(self) -> torch.Tensor:
        """The rows where they are, float32 [rows, len(COLUMNS)]; float64 if a tensor was."""
        if not self._rows:
            return torch.zeros(0, len(COLUMNS), device="cpu", dtype=torch.float32)
        dtype = torch.float64 if any(row.dtype == torch.float64 for row in self._rows) else torch.float32
        return torch.stack([row.to(dtype) for row in self._rows])


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a tensor in one dimension, in the order of memory and without a copy where they lie densely.

    Complex numbers become pairs, float8 becomes float32.
    """
    tensor = tensor.detach().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()
    if tensor.is_contiguous():
        return tensor.view(-1)
    steps = tensor.stride()
    by_memory = tensor.permute(sorted(range(tensor.dim()), key=steps.__getitem__, reverse=True))
    return by_memory.view(-1) if by_memory.is_contiguous() else tensor.reshape(-1).contiguous()
