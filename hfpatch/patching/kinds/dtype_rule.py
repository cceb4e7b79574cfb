"""Which dtype a cast goes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.dtypes import dtype_name
from hfpatch.model.roles import weights_dtype


@dataclass(frozen=True)
class DtypeRule:
    """Which dtype a cast goes to.

    Args:
        dtype: The dtype, where `weight` is empty or gives no floating-point weight (quantised layers).
        weight: Path within the module to a layer whose weight's dtype is followed, so that the cast stays
            right after `model.float()` or `model.half()`.
    """

    dtype: torch.dtype
    weight: tuple[str, ...] | None = None

    def of(self, module: nn.Module) -> torch.dtype:
        """The dtype for this module, now."""
        if self.weight is None:
            return self.dtype
        holder: Any = module
        for name in self.weight:
            holder = getattr(holder, name, None)
        weight = getattr(holder, "weight", None)
        if weight is None:  # the layer was replaced since, by one of another form
            return weights_dtype(module) or self.dtype
        return weight.dtype if weight.dtype.is_floating_point else self.dtype

    def __str__(self) -> str:
        return dtype_name(self.dtype) if self.weight is None else "that of its weights"


def dtype_rule(to: str, module: nn.Module, compute: torch.dtype | None, stream: torch.dtype | None) -> DtypeRule:
    """The rule for a module: `float32`, or `weights` to follow a layer that has the module's usual dtype.

    Where the weights are in another dtype than the model computes in (norms kept in float32), the
    compute dtype is fixed instead.
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
