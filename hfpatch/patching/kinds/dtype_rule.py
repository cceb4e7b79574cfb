"""The target dtype of a cast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.dtypes import dtype_name
from hfpatch.model.roles import weights_dtype


@dataclass(frozen=True)
class DtypeRule:
    """The target dtype of a cast: fixed, or that of a weight when the module is called.

    Args:
        dtype: The fixed dtype; with `weight`, the fallback if that layer has no floating-point weight (quantised).
        weight: Path within the module to the layer whose weight decides, so the cast stays right after
            `model.float()` or `model.half()`; None for the fixed dtype.
    """

    dtype: torch.dtype
    weight: tuple[str, ...] | None = None

    def of(self, module: nn.Module) -> torch.dtype:
        """Return the present target dtype for a module."""
        if self.weight is None:
            return self.dtype
        holder: Any = module
        for name in self.weight:
            holder = getattr(holder, name, None)
        weight = getattr(holder, "weight", None)
        if weight is None:  # the layer was replaced since, by one with another structure
            return weights_dtype(module) or self.dtype
        return weight.dtype if weight.dtype.is_floating_point else self.dtype

    def __str__(self) -> str:
        return dtype_name(self.dtype) if self.weight is None else "that of its weights"


def dtype_rule(to: str, module: nn.Module, compute: torch.dtype | None, stream: torch.dtype | None) -> DtypeRule:
    """Return the rule for a module.

    If the weights have another dtype than the stream (norms kept in float32), the compute dtype is fixed instead of
    following them.

    Args:
        to: `float32`, or `weights` to follow a layer with the dtype of most weights.
        module: The module whose input or output is cast.
        compute: The dtype the model will run in, if the caller gave one.
        stream: Dtype of the residual stream; None if unknown.
    """
    if to == "float32":
        return DtypeRule(torch.float32)
    usual = weights_dtype(module)
    fallback = compute or stream or usual or torch.float16
    if stream is not None and usual != stream:
        return DtypeRule(fallback)
    for path, layer in module.named_modules():
        weight = getattr(layer, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dtype == usual and not path.startswith("lora_"):
            return DtypeRule(fallback, tuple(path.split(".")) if path else ())
    return DtypeRule(fallback)
