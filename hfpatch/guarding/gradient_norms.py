"""Gradient norms in float32, of plain, half-precision and sharded tensors; clipping by a norm that is known."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hfpatch.compat import foreach

if TYPE_CHECKING:
    from torch import Tensor


def piece(tensor: Tensor, world: int) -> tuple[Tensor, float, bool]:
    """What this rank holds of a tensor.

    Args:
        tensor: A plain tensor, which every rank holds a copy of, or a DTensor.
        world: Ranks that are summed over.

    Returns:
        The local part, the weight with which its sum of squares counts in a sum over all ranks, and whether it is
        a part only. A shard that k ranks hold copies of counts 1/k.
    """
    distributed: Any = sys.modules.get("torch.distributed.tensor")  # not imported: there are no DTensors
    if distributed is None or not isinstance(tensor, distributed.DTensor):
        return tensor, 1.0 / world, False
    sharded: Any = tensor
    if any(p.is_partial() for p in sharded.placements):
        return sharded.full_tensor(), 1.0 / world, False
    mesh = sharded.device_mesh
    shards = math.prod(mesh.size(i) for i, p in enumerate(sharded.placements) if not p.is_replicate())
    return sharded.to_local(), shards / mesh.size(), True


def tensor_norms(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norm of each tensor, summed in float32 (float64 tensors: in float64), on the first tensor's device.

    Args:
        tensors: At least one.

    Returns:
        `[len(tensors)]`.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(i)
    found: list[Any] = [None] * len(tensors)
    for (_, dtype), places in groups.items():
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        for i, norm in zip(places, foreach.norms([tensors[i] for i in places], 2, dtype=wide), strict=True):
            found[i] = norm
    if len(groups) == 1:
        return torch.stack(found)
    device = tensors[0].device
    wide = torch.float64 if any(n.dtype == torch.float64 for n in found) else torch.float32
    return torch.stack([norm.to(device=device, dtype=wide) for norm in found])


def clip_(tensors: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale local gradients in place as `torch.nn.utils.clip_grads_with_norm_` does, without a host read.

    Args:
        tensors: Local parts.
        max_norm: Largest norm; infinity leaves them as they are.
        norm: Their total norm, 0-dim.
    """
    if math.isinf(max_norm) or not tensors:
        return
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for (device, _), group in groups.items():
        foreach.multiply_(group, factor.to(device))
