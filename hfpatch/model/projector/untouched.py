"""The proof that a linear layer still holds the very values torch drew for it.

`nn.Linear` draws its float32 weights, and its bias, as `r * 2b - b`, rounded once, with b = 1 / sqrt(fan_in)
and r a float32 of [0, 1]: a multiple of 2^-24 on a CPU, where CUDA's r is finer below 1/2. Most float32 numbers
within the bound are no such value, so a training step, however small, leaves the lattice: of a layer's
thousands of elements about half miss it after one. The bound alone proves nothing, and half precision
rounds lattice points and trained values to the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

CHUNK = 1 << 18
"""Elements looked at together; a trained layer is found out in the first chunk."""

ENOUGH_BITS = 64.0
"""Evidence asked for: values that know nothing of the lattice pass with probability 2 ** -ENOUGH_BITS."""

MOST_BITS = 8.0
"""Most evidence that one element may count for: a tiny value is not worth a hundred others."""


def untouched(module: nn.Module) -> bool:
    """Whether a linear layer may train and provably never did.

    A frozen layer proves nothing: what follows it may have been trained on its output.
    """
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.requires_grad and default_init(module)


def default_init(module: nn.Module) -> bool:
    """Whether an `nn.Linear` provably holds torch's own initial values, weight and bias.

    Only float32 values can prove it. Not so for weights that are not loaded (meta), for sharded ones, for
    values that half precision holds exactly (they were rounded once), and for layers of a few dozen weights.

    Memory: a few tensors of 2^18 elements, on the CPU. Time: about 0.25 s for 10 million weights that pass, a few ms
    for ones that do not.
    """
    if not isinstance(module, nn.Linear) or not plain(module.weight):
        return False
    fan_in = int(module.weight.shape[1])
    if fan_in == 0:
        return False
    # as kaiming_uniform_(a=sqrt(5)) computes it; 1 / sqrt(fan_in) may differ in the last bit
    bound = math.sqrt(3.0) * (math.sqrt(2.0 / 6.0) / math.sqrt(fan_in))
    if not _drawn(module.weight, bound, ENOUGH_BITS):
        return False
    bias: torch.Tensor | None = module.bias
    return bias is None or (plain(bias) and _drawn(bias, 1 / math.sqrt(fan_in), 0.0))  # pyright: ignore[reportUnnecessaryComparison]


def plain(tensor: object) -> bool:
    """Whether a tensor is float32, loaded and whole: neither on meta, nor sharded, nor quantised."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype == torch.float32
        and not tensor.is_meta
        and not hasattr(tensor, "device_mesh")
    )


def _drawn(tensor: torch.Tensor, bound: float, bits: float) -> bool:
    """Whether every element is a value of torch's uniform draw within the bound, worth at least `bits` of evidence."""
    once, twice = True, True  # rounded once (fused multiply-add), or after the product too, all alike
    half, found = dict.fromkeys((torch.float16, torch.bfloat16), True), 0.0
    b = float(torch.tensor(bound, dtype=torch.float32))
    for values in _chunks(tensor):
        if not bool((values.abs() <= b).all()):
            return False
        r = ((values.double() + b) / (2 * b)).float()
        once = once and torch.equal((r.double() * (2 * b) - b).float(), values)
        twice = twice and torch.equal(r * (2 * b) - b, values)
        if not once and not twice:
            return False
        half = {dtype: all_alike and _held_by(dtype, values) for dtype, all_alike in half.items()}
        found += _evidence(values, r, b)
    return found >= bits and not (bits and any(half.values()))


def _evidence(values: torch.Tensor, r: torch.Tensor, b: float) -> float:
    """Bits by which lattice points are rarer than float32 numbers around each value, summed."""
    spacing = 1 + math.log2(b) + torch.frexp(r).exponent
    return float((spacing - torch.frexp(values).exponent).clamp(0, MOST_BITS).sum())


def _held_by(dtype: torch.dtype, values: torch.Tensor) -> bool:
    return torch.equal(values.to(dtype).float(), values)


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        yield flat[start : start + CHUNK].cpu()
