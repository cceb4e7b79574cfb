"""Statistics of a tensor in one pass over it: what is not finite, extremes, mean, RMS, zeros, what vanishes in float16.

On a GPU every figure is of all elements, by one kernel a tensor (`statistics_triton.py`), and nothing is read before
`Rows.read`. On a CPU the finite extremes and the counts of what is not finite are of all elements; the rest is of a
sample of a large tensor, since only `aminmax` is fast there.
"""

from __future__ import annotations

import importlib.util
import math
from collections import defaultdict
from functools import lru_cache
from typing import Protocol

import torch

from hfpatch.numerics.statistics_plain import COLUMNS, THRESHOLDS, DeviceRows, flattened

PLAIN = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))
"""Dtypes that are measured as they are."""

SAMPLE = 2048
"""Elements of a larger tensor that its mean, RMS and shares are taken from on a CPU."""

TOGETHER = 32
"""Samples that are reduced at once: few calls, and what they make stays in the cache, in memory that malloc keeps."""


class Rows(Protocol):
    """Rows of statistics of tensors on one device, gathered there and read once."""

    def add(self, tensor: torch.Tensor) -> int:
        """Measure a tensor of any floating or complex dtype and layout; the number of its row. Waits for no GPU."""
        ...

    def read(self) -> torch.Tensor:
        """float64 [rows, len(COLUMNS)] on the CPU; the one transfer."""
        ...


def rows(device: torch.device) -> Rows:
    """Rows for tensors of one device."""
    if device.type == "cpu":
        return CPURows()
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from hfpatch.numerics.statistics_triton import TritonRows

        return TritonRows(device)
    return DeviceRows()


class CPURows:
    """Extremes at once by `aminmax`; samples together when they are read."""

    def __init__(self) -> None:
        self._found: list[tuple[float, float, float, float, float]] = []
        self._samples: dict[tuple[int, torch.dtype], list[tuple[int, torch.Tensor]]] = defaultdict(list)

    def add(self, tensor: torch.Tensor) -> int:
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

    def read(self) -> torch.Tensor:
        """See `Rows`."""
        # "cpu" is said, since the caller may have set another default device
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
    """A step that takes some `SAMPLE` of `size` elements and shares no factor with `size`, hence with no dimension of
    the tensor in any layout, so that every channel comes up, and both parts of complex numbers.
    """
    step = size // SAMPLE
    while math.gcd(step, size) != 1:
        step += 1
    return step


@lru_cache(maxsize=1024)
def _places(size: int) -> tuple[tuple[int], tuple[int]]:
    """Size and stride of the sample of so many elements."""
    step = stride(size)
    return (-(-size // step),), (step,)


def _with_nonfinite(flat: torch.Tensor) -> tuple[float, float, float, float, float]:
    finite = flat[flat.isfinite()]
    least, most = (float(v) for v in torch.aminmax(finite)) if finite.numel() else (math.inf, -math.inf)
    counts = (flat.isnan().sum(), (flat == math.inf).sum(), (flat == -math.inf).sum())
    nan, posinf, neginf = (float(c) for c in counts)
    return nan, posinf, neginf, least, most


def _sampled(samples: torch.Tensor) -> torch.Tensor:
    """zeros, under_*, sum, squares, counted, in float64, of samples `[rows, elements]` of any floating dtype."""
    x = samples if samples.dtype == torch.float64 else samples.float()
    size = x.abs()
    below = torch.empty_like(size)  # not bool: adding those up takes four times as long
    # NaN and inf lie below nothing
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
