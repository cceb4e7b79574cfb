"""Statistics of tensors on a CUDA device: all tensors of a lot and a dtype in one launch of each of two kernels."""

# Triton comes with torch's CUDA builds only, and its functions are not Python's.
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false, reportIndexIssue=false
# pyright: reportMissingParameterType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hfpatch.numerics.statistics_plain import COLUMNS, DeviceRows, flattened

CHUNK = 1024
WIDTH = 16
"""Floats in a row: the columns, padded to 64 bytes."""
BLOCK = 1024
WARPS = 4
PROGRAMS = 264
"""Largest number of programs for a tensor: two for each of the 132 multiprocessors of an H100."""
MANY, EVERY = 64, 8
"""From this many blocks on, zeros and underflow are counted only in every EVERY-th block: counting takes longer than
reading."""

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _closer(value, inside, nan, posinf, neginf, low, high, sums, powers):
    """Add values, some of which are not finite, to the running statistics."""
    finite = (tl.abs(value) < float("inf")) & inside
    clean = tl.where(finite, value, 0.0)
    return (
        nan + (value != value).to(tl.int32),
        posinf + (value == float("inf")).to(tl.int32),
        neginf + (value == float("-inf")).to(tl.int32),
        tl.minimum(low, tl.where(finite, value, float("inf"))),
        tl.maximum(high, tl.where(finite, value, float("-inf"))),
        sums + clean,
        powers + clean * clean,
    )


@triton.jit
def _extremes(meta, rows, kind: tl.constexpr, aligned: tl.constexpr, block: tl.constexpr):
    """Count non-finite values, and compute extremes, sum and squares, over all elements."""
    tensor = tl.program_id(0)
    program = tl.program_id(1)
    programs = tl.num_programs(1)
    size = tl.load(meta + 2 * tensor + 1)
    x = tl.load(meta + 2 * tensor).to(tl.pointer_type(kind))
    if aligned:
        x = tl.multiple_of(x, 16)
    row = rows + tensor * 16
    lanes = tl.arange(0, block)
    fours = (size // (4 * block)).to(tl.int32)
    blocks = tl.cdiv(size, block).to(tl.int32)
    if program < blocks:
        least = tl.full([block], float("inf"), tl.float32)
        most = tl.full([block], float("-inf"), tl.float32)
        total = tl.zeros([block], tl.float32)
        squares = tl.zeros([block], tl.float32)
        # As if all were finite: the sum of squares tells if not, and then this program's elements are read again.
        for index in range(program, fours, programs):
            place = x + (index.to(tl.int64) * (4 * block) + lanes)
            a = tl.load(place).to(tl.float32)
            b = tl.load(place + block).to(tl.float32)
            c = tl.load(place + 2 * block).to(tl.float32)
            d = tl.load(place + 3 * block).to(tl.float32)
            least = tl.minimum(least, tl.minimum(tl.minimum(a, b), tl.minimum(c, d)))
            most = tl.maximum(most, tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))
            total += (a + b) + (c + d)
            squares += a * a + b * b + c * c + d * d
        for index in range(4 * fours + program, blocks, programs):
            place = index.to(tl.int64) * block + lanes
            inside = place < size
            value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            least = tl.minimum(least, tl.where(inside, value, float("inf")))
            most = tl.maximum(most, tl.where(inside, value, float("-inf")))
            total += value
            squares += value * value
        lowest = tl.min(least, 0)
        highest = tl.max(most, 0)
        added = tl.sum(total, 0)
        power = tl.sum(squares, 0)
        if not (power < float("inf")):
            few: tl.constexpr = block // 4
            some = tl.arange(0, few)
            nan = tl.zeros([few], tl.int32)
            posinf = tl.zeros([few], tl.int32)
            neginf = tl.zeros([few], tl.int32)
            low = tl.full([few], float("inf"), tl.float32)
            high = tl.full([few], float("-inf"), tl.float32)
            sums = tl.zeros([few], tl.float32)
            powers = tl.zeros([few], tl.float32)
            # the same elements: quarters of its fours, then of its single blocks
            for index in range(program, fours, programs):
                for part in range(16):
                    place = index.to(tl.int64) * (4 * block) + part * few + some
                    value = tl.load(x + place).to(tl.float32)
                    nan, posinf, neginf, low, high, sums, powers = _closer(
                        value, some >= 0, nan, posinf, neginf, low, high, sums, powers
                    )
            for index in range(4 * fours + program, blocks, programs):
                for part in range(4):
                    place = index.to(tl.int64) * block + part * few + some
                    inside = place < size
                    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
                    nan, posinf, neginf, low, high, sums, powers = _closer(
                        value, inside, nan, posinf, neginf, low, high, sums, powers
                    )
            lowest = tl.min(low, 0)
            highest = tl.max(high, 0)
            added = tl.sum(sums, 0)
            power = tl.sum(powers, 0)
            tl.atomic_add(row, tl.sum(nan, 0).to(tl.float32))
            tl.atomic_add(row + 1, tl.sum(posinf, 0).to(tl.float32))
            tl.atomic_add(row + 2, tl.sum(neginf, 0).to(tl.float32))
        tl.atomic_min(row + 7, lowest)
        tl.atomic_max(row + 8, highest)
        tl.atomic_add(row + 9, added)
        tl.atomic_add(row + 10, power)


@triton.jit
def _small(meta, rows, kind: tl.constexpr, block: tl.constexpr, many: tl.constexpr, sample: tl.constexpr):
    """Count zeros and underflow in narrower dtypes, in every `sample`-th block of a large tensor."""
    tensor = tl.program_id(0)
    program = tl.program_id(1)
    programs = tl.num_programs(1)
    size = tl.load(meta + 2 * tensor + 1)
    x = tl.load(meta + 2 * tensor).to(tl.pointer_type(kind))
    row = rows + tensor * 16
    lanes = tl.arange(0, block)
    blocks = tl.cdiv(size, block).to(tl.int32)
    every = tl.where(blocks >= many, sample, 1)
    if program * every < blocks:
        zeros = tl.zeros([block], tl.int32)
        float16 = tl.zeros([block], tl.int32)
        e5m2 = tl.zeros([block], tl.int32)
        e4m3 = tl.zeros([block], tl.int32)
        for index in range(program * every, blocks, programs * every):
            place = index.to(tl.int64) * block + lanes
            magnitude = tl.abs(tl.load(x + place, mask=place < size, other=1.0).to(tl.float32))
            zeros += (magnitude == 0).to(tl.int32)
            float16 += (magnitude <= 2.9802322387695312e-08).to(tl.int32)
            e5m2 += (magnitude <= 7.62939453125e-06).to(tl.int32)
            e4m3 += (magnitude <= 0.0009765625).to(tl.int32)
        nothing = tl.sum(zeros, 0)
        tl.atomic_add(row + 3, nothing.to(tl.float32))
        tl.atomic_add(row + 4, (tl.sum(float16, 0) - nothing).to(tl.float32))
        tl.atomic_add(row + 5, (tl.sum(e5m2, 0) - nothing).to(tl.float32))
        tl.atomic_add(row + 6, (tl.sum(e4m3, 0) - nothing).to(tl.float32))


class TritonRows:
    """Rows for CUDA, for `statistics_lots.Lots`; all are read together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: list[torch.Tensor] = []
        self._order: list[int] = []
        self._sizes: list[int] = []
        self._others = DeviceRows()
        self._other_numbers: list[int] = []
        self._used = CHUNK  # of the last table

    def extend(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `statistics_lots.Measured`."""
        numbers: dict[torch.dtype, list[int]] = defaultdict(list)
        listed: dict[torch.dtype, list[tuple[int, int]]] = defaultdict(list)
        kept: list[torch.Tensor] = []  # until the kernels are launched
        for given in tensors:
            plain = given.dtype in DTYPES and given.is_contiguous() and not given.is_neg()
            tensor = given if plain else flattened(given)
            number, size, dtype = len(self._sizes), tensor.numel(), tensor.dtype
            self._sizes.append(size)
            if dtype in DTYPES:
                numbers[dtype].append(number)
                listed[dtype].append((tensor.data_ptr(), size))
                kept.append(tensor)
            else:
                self._others.extend([tensor])
                self._other_numbers.append(number)
        for dtype, together in listed.items():
            self._launch(dtype, together)
            self._order += numbers[dtype]

    def _launch(self, dtype: torch.dtype, listed: list[tuple[int, int]]) -> None:
        """Launch the kernels for tensors of a dtype, each an address and a number of elements."""
        count = len(listed)
        if self._used + count > CHUNK:
            self._new_chunk()
        place = slice(self._used, self._used + count)
        self._used += count
        self._host[place] = listed
        meta, rows = self._meta[place], self._tables[-1][place]
        meta.copy_(self._pinned[place], non_blocking=True)
        aligned = all(address % 16 == 0 for address, _ in listed)
        blocks = -(-max(size for _, size in listed) // BLOCK)
        kind = DTYPES[dtype]
        with torch.cuda.device(self._device):
            grid = (count, max(1, min(PROGRAMS, blocks)))
            _extremes[grid](meta, rows, kind, aligned, BLOCK, num_warps=WARPS)
            grid = (count, max(1, min(PROGRAMS, blocks // EVERY)))
            _small[grid](meta, rows, kind, BLOCK, MANY, EVERY, num_warps=WARPS)

    def _new_chunk(self) -> None:
        """Allocate more rows. Pinned memory is not reused: a copy from it may still be running."""
        rows = torch.zeros(CHUNK, WIDTH, dtype=torch.float32, device=self._device)
        rows[:, 7].fill_(math.inf)
        rows[:, 8].fill_(-math.inf)
        if self._tables:
            self._tables[-1] = self._tables[-1][: self._used]
        self._tables.append(rows)
        self._meta = torch.empty(CHUNK, 2, dtype=torch.int64, device=self._device)
        self._pinned = torch.empty(CHUNK, 2, dtype=torch.int64, device="cpu", pin_memory=True)
        self._host = self._pinned.numpy()
        self._used = 0

    def read(self) -> torch.Tensor:
        """See `statistics_lots.Measured`."""
        if not self._sizes:
            return torch.zeros(0, len(COLUMNS), dtype=torch.float64, device="cpu")
        if self._tables:
            self._tables[-1] = self._tables[-1][: self._used]
        pieces = [rows[:, : len(COLUMNS)] for rows in self._tables]
        if self._other_numbers:
            pieces.append(self._others.stacked().to(self._device))
        found = torch.cat(pieces).cpu().double()
        table = torch.empty_like(found)
        table[torch.tensor([*self._order, *self._other_numbers], device="cpu")] = found
        sizes = torch.tensor(self._sizes, dtype=torch.float64, device="cpu")
        if self._order:
            ours = torch.tensor(self._order, device="cpu")
            table[ours, 3:7] *= (sizes[ours] / _counted(sizes[ours])).clamp(min=1).nan_to_num(1.0)[:, None]
        table[:, 11] = sizes - table[:, :3].sum(1)
        return table


def _counted(sizes: torch.Tensor) -> torch.Tensor:
    """Return the number of elements in which zeros were counted, by size of the tensor."""
    blocks = torch.ceil(sizes / BLOCK)
    last = torch.ceil(blocks / EVERY) - 1
    sampled = last * BLOCK + (sizes - last * EVERY * BLOCK).clamp(max=BLOCK)
    return torch.where(blocks >= MANY, sampled, sizes)
