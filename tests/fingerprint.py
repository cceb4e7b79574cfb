"""Everything about a model that a revert must give back, as one comparable value."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

HOOKS = [
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
]
MEMO = "_can_set_attn_implementation_cached_value"
"""Kept by transformers on a class once it has read its source; says nothing about any model."""
OWN = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *HOOKS}


def tensor(value: torch.Tensor) -> tuple[Any, ...]:
    data = value.detach().contiguous().reshape(-1).view(torch.uint8) if value.numel() else value
    return (
        id(value),
        str(value.dtype),
        tuple(value.shape),
        value.requires_grad,
        type(value).__name__,
        hashlib.sha256(data.cpu().numpy().tobytes()).hexdigest(),
    )


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Classes, `__dict__` keys in order and values, tensors by bytes and identity, hooks, config."""
    out: dict[str, Any] = {}
    classes: dict[type, list[str]] = {}
    configs: dict[int, tuple[str, Any]] = {}  # most modules share one, and its text takes longest
    for path, module in model.named_modules():
        plain = {k: v for k, v in module.__dict__.items() if k not in OWN}
        if (cls := type(module)) not in classes:
            classes[cls] = sorted(k for k in vars(cls) if not k.startswith("__") and k != MEMO)
        out[path] = {
            "class": (id(cls), classes[cls]),
            "keys": list(module.__dict__),
            "values": {
                k: repr(v) if isinstance(v, (int, float, str, bool, type(None))) else id(v) for k, v in plain.items()
            },
            "parameters": [(k, None if v is None else tensor(v)) for k, v in module._parameters.items()],
            "buffers": [(k, None if v is None else tensor(v)) for k, v in module._buffers.items()],
            "persistence": sorted(module._non_persistent_buffers_set),
            "children": [(k, id(v)) for k, v in module._modules.items()],
            "hooks": {h: [(k, id(v) if callable(v) else v) for k, v in getattr(module, h).items()] for h in HOOKS},
        }
        config = getattr(module, "config", None)
        if hasattr(config, "to_dict"):
            if id(config) not in configs:
                configs[id(config)] = repr(config.to_dict()), config._attn_implementation
            out[path]["config"] = (id(config), *configs[id(config)])
    return out
