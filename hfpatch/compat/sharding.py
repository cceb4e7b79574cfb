# FSDP2 keeps the policy of a module in its state, for which torch has no public name
"""How FSDP2 casts the inputs and outputs of a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

ACCESS = "_get_fsdp_state"
"""Name of the method that `fully_shard` adds to the class of a module."""


def narrows_stream(module: nn.Module) -> str:
    """Return how FSDP2 casts the residual stream of a module to half precision; empty if it does not."""
    if not hasattr(type(module), ACCESS):
        return ""
    policy: Any = getattr(getattr(module, ACCESS)(), "_mp_policy", None)
    if policy is None:
        return ""
    if policy.cast_forward_inputs and _is_half(policy.param_dtype):
        return "FSDP casts the layer's input back; wrap with cast_forward_inputs=False"
    if _is_half(policy.output_dtype):
        return "FSDP casts the layer's output back; wrap with output_dtype=None"
    return ""


def _is_half(dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize
