"""Gradient norms in float32, of plain, half-precision and sharded tensors; clipping by a given norm."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hfpatch.compat import foreach

if TYPE_CHECKING:
    from torch import Tensor


def is_distributed(tensor: Tensor) -> bool:
    """True if a tensor is a DTensor."""
    distributed: Any = sys.modules.get("torch.distributed.tensor")  # if it is not imported, there are no DTensors
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def local_part(tensor: Tensor, world: int) -> tuple[Tensor, float, bool]:
    """Return this rank's part of a tensor.

    Args:
        tensor: A plain tensor, of which every rank holds a copy, or a DTensor.
        world: Number of ranks that are summed over.

    Returns:
        The local part; the weight of its sum of squares in a sum over all ranks (1/k if k ranks hold the same part);
        and True if the tensor is a DTensor that is not partial, so that the part may be a shard.
    """
    if not is_distributed(tensor):
        return tensor, 1.0 / world, False
    sharded: Any = tensor
    if any(p.is_partial() for p in sharded.placements):
        return sharded.full_tensor(), 1.0 / world, False
    mesh = sharded.device_mesh
    shards = math.prod(mesh.size(i) for i, p in enumerate(sharded.placements) if not p.is_replicate())
    return sharded.to_local(), shards / mesh.size(), True


def local_parts(tensors: Sequence[Tensor], world: int) -> tuple[list[Tensor], tuple[float, ...], bool]:
    """Return `local_part` of each tensor: the parts, their weights, and True if one of them may be a shard."""
    distributed: Any = sys.modules.get("torch.distributed.tensor")
    if distributed is None or not any(isinstance(t, distributed.DTensor) for t in tensors):
        return list(tensors), (1.0 / world,) * len(tensors), False
    pieces = [local_part(t, world) for t in tensors]
    return [part for part, _, _ in pieces], tuple(weight for _, weight, _ in pieces), any(cut for _, _, cut in pieces)


def tensor_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each tensor, summed in float32 (float64 tensors: in float64), on the first one's device.

    Args:
        tensors: At least one tensor.

    Returns:
        The norms, `[len(tensors)]`.
    """
    found: list[Any] = [None] * len(tensors)
    groups = _alike(tensors)
    for places in groups:
        group = [tensors[i] for i in places]
        wide = torch.float32 if group[0].dtype in (torch.float16, torch.bfloat16) else None
        for i, norm in zip(places, foreach.norms(group, 2, dtype=wide), strict=True):
            found[i] = norm
    if len(groups) == 1:
        return torch.stack(found)
    device = tensors[0].device
    wide = torch.float64 if any(n.dtype == torch.float64 for n in found) else torch.float32
    return torch.stack([norm.to(device=device, dtype=wide) for norm in found])


def _alike(tensors: Sequence[Tensor]) -> list[Sequence[int]]:
    """Return the indices of the tensors of each device and dtype."""
    kinds = [(t.device, t.dtype) for t in tensors]
    different = dict.fromkeys(kinds)
    if len(different) == 1:
        return [range(len(kinds))]
    return [[i for i, other in enumerate(kinds) if other == kind] for kind in different]


def wide_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each tensor, those that pass float32 (beyond 1.8e19) computed in float64; `[len(tensors)]`.

    It waits for the device.
    """
    norms = tensor_norms(tensors)
    if bool(norms.isfinite().all()) or norms.device.type == "mps":
        return norms
    wide = [torch.linalg.vector_norm(t, dtype=torch.float64).to(norms.device) for t in tensors]
    return torch.stack(wide)


def clip_(tensors: Sequence[Tensor], max_norm: float, norm: Tensor, limit: Tensor | None = None) -> None:
    """Scale local gradients in place as `torch.nn.utils.clip_grads_with_norm_` does, without a host read.

    Args:
        tensors: This rank's parts of the gradients.
        max_norm: Norm to clip to; with infinity and no `limit` they stay as they are.
        norm: The total norm of all gradients, 0-dim; where it is not finite they stay as they are.
        limit: Another norm to clip to, 0-dim, if it is smaller.
    """
    if not tensors or (math.isinf(max_norm) and limit is None):
        return
    # the same roundings as torch's `max_norm / (norm + 1e-6)`
    top = max_norm if limit is None else limit.clamp(max=max_norm).to(norm)
    factor = torch.clamp((norm + 1e-6).reciprocal() * top, max=1.0)
    factor = torch.where(norm < math.inf, factor, 1.0)
    for places in _alike(tensors):
        group = [tensors[i] for i in places]
        foreach.multiply_(group, factor.to(group[0].device))
