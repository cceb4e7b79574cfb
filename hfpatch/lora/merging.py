"""How much of an adapter's update is left after merging: PEFT merges copies of some rows of each layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.compat.modules import BUFFERS, CHILDREN, PARAMETERS, buffers, children, parameters
from hfpatch.dtypes import dtype_name
from hfpatch.model.evaluating.divided import plain_weight
from hfpatch.model.evaluating.full_float32 import full_float32
from hfpatch.model.source import REJECTIONS

VALUES = 2**16
"""Weights that are merged in each layer, in rows evenly spaced over it."""
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Merge:
    """The share of an adapter's update, by its sum of squares, that the merged weights of a half-precision base hold.

    1 - |change - update|^2 / |update|^2, where the update is that of a merge in float64; 0 if rounding changes as much.

    Attributes:
        dtype: Of the base weights.
        kept: The share if they are merged in it.
        in_float32: The share if they are merged in float32.
    """

    dtype: torch.dtype
    kept: float
    in_float32: float

    def __str__(self) -> str:
        return (
            f"merging it in {dtype_name(self.dtype)} keeps {self.kept:.1%} of its update and rounds the rest away, in "
            f"float32 {self.in_float32:.1%}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return dtype, kept, in_float32, for JSON."""
        return {"dtype": dtype_name(self.dtype), "kept": self.kept, "in_float32": self.in_float32}


def merge_of(modules: Iterable[nn.Module], adapter: str) -> Merge | None:
    """Return what merging keeps of an adapter, layer by layer; nothing in the model is touched.

    Args:
        modules: The modules of the model.
        adapter: Its name.

    Returns:
        None if it changes nothing, is merged already or cannot be merged, or has no layer around a linear map with
        weights in half precision.
    """
    layers = [layer for layer in modules if _is_mergeable(layer, adapter)]
    if not layers:
        return None
    dtype = _weight(layers[0]).dtype
    lost, lost_in_float32, whole = 0.0, 0.0, 0.0
    for layer in layers:
        if _weight(layer).dtype != dtype:
            continue
        try:
            with full_float32():
                base = _weight(_rows_of(layer, adapter, torch.float64)).detach()
                update = _merged(layer, adapter, torch.float64) - base
                change, wide = [_merged(layer, adapter, to).double() - base for to in (None, torch.float32)]
        except REJECTIONS:
            return None
        whole += float(update.square().sum())
        lost += float((change - update).square().sum())
        lost_in_float32 += float((wide - update).square().sum())
    if not whole:
        return None
    return Merge(dtype, max(0.0, 1 - lost / whole), max(0.0, 1 - lost_in_float32 / whole))


def _is_mergeable(module: nn.Module, adapter: str) -> bool:
    layer: Any = module
    if "lora_A" not in children(layer) or adapter not in layer.lora_A or layer.merged:
        return False
    weight = plain_weight(layer.get_base_layer())
    return (
        weight is not None
        and weight.dim() == 2
        and weight.dtype in HALF
        and not any(p.is_meta for p in layer.parameters())
        and len(layer.lora_B[adapter].weight) == weight.shape[_axis(layer)]
    )


def _weight(layer: Any) -> torch.Tensor:
    return layer.get_base_layer().weight


def _axis(layer: Any) -> int:
    """Return the axis of a base weight along which the outputs lie."""
    return 1 if getattr(layer, "fan_in_fan_out", False) else 0


def _merged(layer: Any, adapter: str, dtype: torch.dtype | None) -> torch.Tensor:
    """Return some rows of a layer's weight with the adapter merged in a dtype; None for the dtypes that it has."""
    made = _rows_of(layer, adapter, dtype)
    made.merge(adapter_names=[adapter])
    return _weight(made).detach()


def _rows_of(layer: Any, adapter: str, dtype: torch.dtype | None) -> Any:
    """Return a copy of a layer that has some of its outputs only, on the CPU."""
    weight, axis = _weight(layer), _axis(layer)
    outputs = weight.shape[axis]
    count = max(1, min(outputs, VALUES // max(1, weight.numel() // outputs)))
    rows = torch.linspace(0, outputs - 1, count, device="cpu", dtype=torch.float64).long()
    held = [layer.get_base_layer(), layer.lora_B[adapter], getattr(layer, "lora_magnitude_vector", nn.Module())]
    along = {id(p): 0 for module in held for p in module.parameters()} | {id(weight): axis}

    def part(tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.detach()
        if id(tensor) in along:
            found = found.index_select(along[id(tensor)], rows.to(tensor.device))
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return found.to("cpu", wanted, copy=True)

    return _copied(layer, part)


def _copied(module: nn.Module, part: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a copy of a module and its children, with parts of its tensors; other attributes are shared."""
    made = module.__new__(type(module))
    plain = {k: copy.copy(v) if isinstance(v, (dict, list, set)) else v for k, v in vars(module).items()}
    made.__dict__.update(plain)
    own = vars(made)
    own[PARAMETERS] = {
        name: None if p is None else nn.Parameter(part(p), requires_grad=False)
        for name, p in parameters(module).items()
    }
    own[BUFFERS] = {name: None if b is None else part(b) for name, b in buffers(module).items()}
    own[CHILDREN] = {name: None if m is None else _copied(m, part) for name, m in children(module).items()}
    return made
