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
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import torch

from hfpatch.numerics.statistics_lots import Lots, most_waiting
from hfpatch.numerics.statistics_plain import COLUMNS, THRESHOLDS, DeviceRows, flattened

PLAIN = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))
"""Dtypes that are measured without a cast."""

SAMPLE = 2048
"""Elements of a larger tensor from which mean, RMS and shares are computed on a CPU."""

EXTREMES, OF_SAMPLE = (0, 1, 2, 7, 8), (3, 4, 5, 6, 9, 10, 11)
"""Columns that are of all elements, and those that are of a sample of a large tensor."""

TOGETHER = 64 * SAMPLE
"""Elements of samples that are reduced together: this saves calls, and temporaries stay small enough for the cache."""


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
    """Rows for the CPU. What is small is copied, and reduced with others of its shape when the rows are read.

    Of what is large, extremes are computed at once by `aminmax`, and the rest from a copy of a sample.
    """

    def __init__(self) -> None:
        self.late: set[int] = set()
        self._count = 0
        self._extremes: dict[int, tuple[float, float, float, float, float]] = {}
        self._samples: dict[tuple[tuple[int, ...], torch.dtype, bool], list[tuple[int, torch.Tensor]]]
        self._samples = defaultdict(list)

    def add(self, tensor: torch.Tensor, *, at_once: bool = True) -> int:
        """See `Rows`."""
        number = self._count
        self._count += 1
        flat = tensor.detach() if tensor.requires_grad else tensor
        if not (flat.dtype in PLAIN and flat.is_contiguous() and not flat.is_neg()):
            flat = flattened(flat)
        size = flat.numel()
        if size == 0:
            self._extremes[number] = (0.0, 0.0, 0.0, math.inf, -math.inf)
        elif size <= 2 * SAMPLE:
            self._samples[flat.shape, flat.dtype, True].append((number, flat.clone()))
        else:
            low, high = torch.aminmax(flat)
            least, most = low.item(), high.item()
            finite = math.isfinite(least) and math.isfinite(most)
            self._extremes[number] = (0.0, 0.0, 0.0, least, most) if finite else _with_nonfinite(flat)
            sample = flat.as_strided(*_places(size)).contiguous()
            self._samples[sample.shape, sample.dtype, False].append((number, sample))
        return number

    def flush(self) -> None:
        """See `Rows`; nothing waits."""

    def read(self) -> torch.Tensor:
        """See `Rows`."""
        # "cpu" is explicit, because the caller may have set another default device
        table = torch.zeros(self._count, len(COLUMNS), dtype=torch.float64, device="cpu")
        numbers = list(self._extremes)
        found = [torch.tensor(list(self._extremes.values()), dtype=torch.float64, device="cpu").view(-1, 5)]
        sampled: list[int] = []
        figures: list[torch.Tensor] = []
        for (shape, _, whole), listed in self._samples.items():
            many = max(1, TOGETHER // math.prod(shape))
            for start in range(0, len(listed), many):
                places, samples = zip(*listed[start : start + many], strict=True)
                with torch.autocast("cpu", enabled=False):  # which stacks no float16 where it computes in bfloat16
                    together = torch.stack(samples).view(len(samples), -1)
                sampled += places
                figures.append(_sampled(together))
                if whole:
                    numbers += places
                    found.append(_whole(together))
        _fill(table, numbers, EXTREMES, found)
        _fill(table, sampled, OF_SAMPLE, figures)
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


def _fill(table: torch.Tensor, rows: Sequence[int], columns: Sequence[int], found: list[torch.Tensor]) -> None:
    if rows:
        table[torch.tensor(rows, device="cpu")[:, None], torch.tensor(columns, device="cpu")] = torch.cat(found)


def _whole(tensors: torch.Tensor) -> torch.Tensor:
    """Return nan, posinf, neginf, min and max of whole tensors `[rows, elements]`, float64 `[rows, 5]`."""
    low, high = torch.aminmax(tensors, dim=1)
    low, high = low.double(), high.double()
    counts = torch.zeros(3, len(tensors), dtype=torch.float64, device="cpu")
    if not bool((low.isfinite() & high.isfinite()).all()):
        finite = tensors.isfinite()
        counts = torch.stack([tensors.isnan().sum(1), (tensors == math.inf).sum(1), (tensors == -math.inf).sum(1)])
        low, high = torch.where(finite, tensors, math.inf).amin(1), torch.where(finite, tensors, -math.inf).amax(1)
    return torch.stack([*counts.double(), low.double(), high.double()], dim=1)


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
