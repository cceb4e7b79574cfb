"""torch's encoder layers, which in evaluation hand their weights to one fused kernel.

The forwards of their linear maps, of adapters around them too, do not run then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from hfpatch.compat.modules import children
from hfpatch.model.walk import peek

ACTIVATION, NESTED = "activation_relu_or_gelu", "use_nested_tensor"
"""Attributes of torch's encoder layer, which has no kernel if the first is 0, and of its encoder."""


def takes_fast_path(layer: nn.Module) -> bool:
    """True if a module is torch's encoder layer, and evaluation runs its fused kernel where the input allows that.

    These are the conditions of torch's own forward that do not depend on the input, the mode or hooks.
    """
    if not isinstance(layer, nn.TransformerEncoderLayer) or not _runs_torchs_forward(type(layer)):
        return False
    attention: Any = layer.self_attn
    eps = peek(layer.norm1, "eps"), peek(layer.norm2, "eps")
    return bool(
        getattr(layer, ACTIVATION, 0)
        and peek(attention, "batch_first")
        and peek(attention, "in_proj_bias") is not None
        and peek(attention, "in_proj_weight") is not None  # None if queries and keys have other widths
        and (peek(attention, "num_heads") or 1) % 2 == 0
        and eps[0] == eps[1]
    )


def _runs_torchs_forward(cls: type[nn.TransformerEncoderLayer]) -> bool:
    """True if the forward of an encoder layer is torch's own, or calls it."""
    if cls.forward is nn.TransformerEncoderLayer.forward:
        return True
    code = getattr(cls.forward, "__code__", None)
    return code is not None and "forward" in code.co_names


def passed_over(layer: nn.Module) -> list[str]:
    """Return the children of an encoder layer that have a forward of their own, which its fused kernel would not run.

    These are adapters, quantised maps and whatever else is not torch's own module.
    """
    inside = {name: child for name, child in children(layer).items() if child is not None}
    return [n for n, m in inside.items() if not type(m).__module__.startswith("torch.") or "forward" in vars(m)]


def fast_layers(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    """Return torch's encoder layers that take the fast path in evaluation, by path."""
    return {path: module for path, module in modules if takes_fast_path(module)}
