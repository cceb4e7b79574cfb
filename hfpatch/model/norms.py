"""Normalisation layers: how they are recognised, which attribute holds their eps, and whether they are untrained."""

from __future__ import annotations

import inspect
import math

import torch
from torch import nn

from hfpatch.compat import dynamo
from hfpatch.compat.modules import BATCH_NORMS, parameters
from hfpatch.model.walk import dims

LARGE = 1e-2
"""An eps of this or more is not that of a norm: losses that smooth labels have one of 0.1."""
EPS_NAMES = ("eps", "variance_epsilon", "epsilon", "layer_norm_eps")
"""Attribute names of eps, the most common first."""


def is_norm(module: nn.Module) -> bool:
    """True if a module normalises over features: a LayerNorm or RMSNorm, torch's, transformers' or hand-written.

    It is one by the name of its class, or by what it holds: an eps and a weight. Batch norms, group norms and
    containers with "norm" in their class name do not count.
    """
    name = type(module).__name__.lower()
    if "norm" not in name and not isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and not _holds_eps_and_weight(module):
        return False
    if isinstance(module, (BATCH_NORMS, nn.GroupNorm)) or "batchnorm" in name or "groupnorm" in name:
        return False
    if next(module.children(), None) is not None:
        return False
    return all(dims(p) <= 1 for p in module.parameters(recurse=False))


def _holds_eps_and_weight(module: nn.Module) -> bool:
    if module.__dict__.keys().isdisjoint(EPS_NAMES):
        return False
    weight, eps = parameters(module).get("weight"), eps_of(module)
    return weight is not None and dims(weight) == 1 and eps is not None and 0 < eps < LARGE


def acts_as_norm(module: nn.Module) -> bool:
    """True if a module is a norm, or a wrapper of PEFT or torch.compile that holds only norms."""
    if is_norm(module):
        return True
    if not type(module).__module__.startswith(("peft.", f"{dynamo.PACKAGE}.")):
        return False
    owners = [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]
    return bool(owners) and all(is_norm(m) for m in owners)


def is_torch_norm(module: nn.Module) -> bool:
    """True if a norm is, or wraps, torch's LayerNorm or RMSNorm, which need input and weight in one dtype."""
    return any(isinstance(m, (nn.LayerNorm, nn.RMSNorm)) for m in module.modules())


def eps_name(module: nn.Module) -> str | None:
    """Return the name of the attribute that holds a norm's eps; None if it has none, or only a property."""
    for name in EPS_NAMES:
        if hasattr(inspect.getattr_static(type(module), name, None), "__get__"):
            continue
        value = getattr(module, name, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return name
    return None


def eps_of(module: nn.Module) -> float | None:
    """Return a norm's eps; None if it has none."""
    name = eps_name(module)
    return None if name is None else float(getattr(module, name))


def same_eps(a: float, b: float) -> bool:
    """True if two values are equal up to float32 rounding (a GGUF file stores 1e-6 as 9.999999974752427e-07)."""
    return math.isclose(a, b, rel_tol=1e-6)


def untrained(module: nn.Module) -> bool:
    """True if a norm provably has its initial values: weight all 1, bias all 0, and trainable.

    False for a norm without a weight, for a frozen one (later layers may have been trained on its output) and for
    weights on meta. Also for a half-precision weight of 1 without a bias: bfloat16 rounds an optimizer step of 1e-3
    on a 1 away, but a bias of 0 would have moved.
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, torch.Tensor) or not weight.requires_grad:
        return False
    return (bias is not None or weight.dtype == torch.float32) and as_made(module)


def as_made(module: nn.Module) -> bool:
    """True if a norm's weight is all 1 and its bias, if any, all 0. False if the weight is on meta."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, torch.Tensor) or weight.is_meta:
        return False
    clean_bias = bias is None or (isinstance(bias, torch.Tensor) and not bool(bias.detach().any()))
    return bool((weight.detach() == 1).all()) and clean_bias
