"""The proof that a linear layer still holds the initial values that torch drew for it.

`nn.Linear` draws its float32 weights, and its bias, as `r * 2b - b`, with b = 1 / sqrt(fan_in) and r a float32 in
[0, 1]: a multiple of 2^-24 on a CPU; CUDA's r is finer below 1/2. Most float32 numbers within the bound are not such
values, so a training step, however small, leaves this lattice: about half of a layer's elements miss it after one
step. The bound alone proves nothing, and half precision rounds lattice points and trained values to the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

CHUNK = 1 << 18
"""Elements checked at a time; a trained layer fails in the first chunk."""

ENOUGH_BITS = 64.0
"""Required evidence, in bits: values off the lattice pass by chance with probability 2 ** -ENOUGH_BITS."""

MOST_BITS = 8.0
"""Largest evidence of one element, in bits, so that a few tiny values do not decide."""


def untouched(module: nn.Module) -> bool:
    """True if a linear layer is trainable and provably holds its initial values.

    False for a frozen layer: later layers may have been trained on its output.
    """
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.requires_grad and default_init(module)


def default_init(module: nn.Module) -> bool:
    """True if an `nn.Linear` provably holds torch's initial values, weight and bias.

    Only float32 values can prove it. False for weights on meta, for sharded weights, for values that half precision
    represents exactly (they were rounded), and for layers with a few dozen weights.

    Memory: a few tensors of 2^18 elements, on the CPU. Time: about 0.25 s for 10 million weights that pass, a few ms
    for weights that do not.
    """
    if not isinstance(module, nn.Linear) or not is_local_float32(module.weight):
        return False
    fan_in = int(module.weight.shape[1])
    if fan_in == 0:
        return False
    # computed as in kaiming_uniform_(a=sqrt(5)): 1 / sqrt(fan_in) may differ in the last bit
    bound = math.sqrt(3.0) * (math.sqrt(2.0 / 6.0) / math.sqrt(fan_in))
    if not _drawn(module.weight, bound, ENOUGH_BITS):
        return False
    bias: torch.Tensor | None = module.bias
    return bias is None or (is_local_float32(bias) and _drawn(bias, 1 / math.sqrt(fan_in), 0.0))  # pyright: ignore[reportUnnecessaryComparison]


def is_local_float32(tensor: object) -> bool:
    """True if a tensor is float32, and neither on meta nor sharded."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype == torch.float32
        and not tensor.is_meta
        and not hasattr(tensor, "device_mesh")
    )


def _drawn(tensor: torch.Tensor, bound: float, bits: float) -> bool:
    """True if every element is a value of torch's uniform draw within the bound, with at least `bits` of evidence."""
    once, twice = True, True  # rounded once (fused multiply-add) or after the product too, the same way everywhere
    half, found = dict.fromkeys((torch.float16, torch.bfloat16), True), 0.0
    b = float(torch.tensor(bound, dtype=torch.float32, device="cpu"))
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
    """Return the bits by which lattice points are rarer than float32 numbers around each value, summed."""
    spacing = 1 + math.log2(b) + torch.frexp(r).exponent
    return float((spacing - torch.frexp(values).exponent).clamp(0, MOST_BITS).sum())


def _held_by(dtype: torch.dtype, values: torch.Tensor) -> bool:
    return torch.equal(values.to(dtype).float(), values)


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        yield flat[start : start + CHUNK].cpu()
