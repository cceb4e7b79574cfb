"""Statistics of a tensor: counts of non-finite values, extremes, mean, RMS, zeros, and underflow in narrower dtypes.

On a GPU they are computed by Triton kernels for many tensors at once (`statistics_triton.py`), over all elements except
that zeros and underflow of a large tensor are estimated from a part of it; nothing is read before `Rows.read`. On a CPU
extremes and non-finite values are those of all elements, and the rest is that of a sample of a large tensor, since only
`aminmax` is fast there.
"""

from __future__ import annotations

import importlib.util
import math
from collections import defaultdict
from functools import lru_cache
from typing import Protocol

import torch

from hfpatch.numerics.statistics_lots import Lots, most_waiting
from hfpatch.numerics.statistics_plain import COLUMNS, THRESHOLDS, DeviceRows, flattened

PLAIN = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))
"""Dtypes that are measured without a cast."""

SAMPLE = 2048
"""Elements of a larger tensor from which mean, RMS and shares are computed on a CPU."""

TOGETHER = 32
"""Samples that are reduced together: this saves calls, and temporaries stay small enough for the cache."""


class Rows(Protocol):
    """Rows of statistics of tensors on one device, collected there and read once.

    Attributes:
        late: Once they are read: rows of tensors that were written to in place before they were measured.
    """

    late: set[int]

    def add(self, tensor: torch.Tensor, *, at_once: bool = False) -> int:
        """Take in a floating-point or complex tensor, and return the index of its row. Does not wait for a GPU.

        Args:
            tensor: The tensor.
            at_once: Measure it before anything else can write to it; else it may wait for others.
        """
        ...

    def flush(self) -> None:
        """Measure what waits."""
        ...

    def read(self) -> torch.Tensor:
        """Return the rows, float64 `[rows, len(COLUMNS)]` on the CPU, in one transfer."""
        ...


def rows(device: torch.device) -> Rows:
    """Return empty rows for tensors of one device."""
    if device.type == "cpu":
        return CPURows()
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from hfpatch.numerics.statistics_triton import TritonRows

        return Lots(TritonRows(device), most_waiting(device))
    return Lots(DeviceRows(), 0)


class CPURows:
    """Rows for the CPU: extremes are computed at once by `aminmax`, samples are reduced together when read."""

    def __init__(self) -> None:
        self.late: set[int] = set()
        self._found: list[tuple[float, float, float, float, float]] = []
        self._samples: dict[tuple[int, torch.dtype], list[tuple[int, torch.Tensor]]] = defaultdict(list)

    def add(self, tensor: torch.Tensor, *, at_once: bool = True) -> int:
        """See `Rows`."""
        number = len(self._found)
        plain = tensor.dtype in PLAIN and tensor.is_contiguous() and not tensor.is_neg()
        flat = tensor.detach() if plain else flattened(tensor)
        size = flat.numel()
        if size == 0:
            self._found.append((0.0, 0.0, 0.0, math.inf, -math.inf))
            return number
        low, high = torch.aminmax(flat)
        least, most = low.item(), high.item()
        finite = math.isfinite(least) and math.isfinite(most)
        self._found.append((0.0, 0.0, 0.0, least, most) if finite else _with_nonfinite(flat))
        sample = flat.flatten().clone() if size <= 2 * SAMPLE else flat.as_strided(*_places(size)).contiguous()
        self._samples[sample.numel(), sample.dtype].append((number, sample))
        return number

    def flush(self) -> None:
        """See `Rows`; nothing waits."""

    def read(self) -> torch.Tensor:
        """See `Rows`."""
        # "cpu" is explicit, because the caller may have set another default device
        table = torch.zeros(len(self._found), len(COLUMNS), dtype=torch.float64, device="cpu")
        if self._found:
            table[:, [0, 1, 2, 7, 8]] = torch.tensor(self._found, dtype=torch.float64, device="cpu")
        order: list[int] = []
        found: list[torch.Tensor] = []
        for listed in self._samples.values():
            for start in range(0, len(listed), TOGETHER):
                numbers, samples = zip(*listed[start : start + TOGETHER], strict=True)
                order += numbers
                found.append(_sampled(torch.stack(samples)))
        if found:
            columns = torch.tensor([3, 4, 5, 6, 9, 10, 11], device="cpu")
            table[torch.tensor(order, device="cpu")[:, None], columns] = torch.cat(found)
        return table


def stride(size: int) -> int:
    """Return a step that takes about `SAMPLE` of `size` elements.

    It shares no factor with `size`, so with no dimension of the tensor: the sample has elements of every channel, and
    both parts of complex numbers.
    """
    step = size // SAMPLE
    while math.gcd(step, size) != 1:
        step += 1
    return step


@lru_cache(maxsize=1024)
def _places(size: int) -> tuple[tuple[int], tuple[int]]:
    """Return size and stride of the sample of a tensor with this many elements."""
    step = stride(size)
    return (-(-size // step),), (step,)


def _with_nonfinite(flat: torch.Tensor) -> tuple[float, float, float, float, float]:
    finite = flat[flat.isfinite()]
    least, most = (float(v) for v in torch.aminmax(finite)) if finite.numel() else (math.inf, -math.inf)
    counts = (flat.isnan().sum(), (flat == math.inf).sum(), (flat == -math.inf).sum())
    nan, posinf, neginf = (float(c) for c in counts)
    return nan, posinf, neginf, least, most


def _sampled(samples: torch.Tensor) -> torch.Tensor:
    """Return zeros, under_*, sum, squares and counted of samples `[rows, elements]`, float64 `[rows, 7]`."""
    x = samples if samples.dtype == torch.float64 else samples.float()
    size = x.abs()
    below = torch.empty_like(size)  # not bool: summing bools takes four times as long
    # NaN and inf compare false
    zeros, *under = [torch.le(size, t, out=below).sum(1) for t in (0.0, *THRESHOLDS)]
    wide = x.double()
    squares = (wide * wide).sum(1)
    counted = torch.full_like(squares, x.shape[1])
    if not squares.isfinite().all():
        finite = wide.isfinite()
        counted = finite.sum(1)
        wide = torch.where(finite, wide, 0)
        squares = (wide * wide).sum(1)
    return torch.stack([zeros, *(u - zeros for u in under), wide.sum(1), squares, counted], dim=1).double()
