"""Normalisation layers: which modules are one, where their eps is, and whether they were ever trained."""

from __future__ import annotations

import inspect
import math

import torch
from torch import nn

from hfpatch.compat import dynamo
from hfpatch.compat.modules import BATCH_NORMS
from hfpatch.model.walk import dims

EPS_NAMES = ("eps", "variance_epsilon", "epsilon", "layer_norm_eps")
"""Attribute names of eps, by how often transformers' models use them."""


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises over features: a LayerNorm or RMSNorm, torch's, transformers' or hand-written.

    Batch and group norms are not meant; nor are containers that merely have "norm" in their name.
    """
    name = type(module).__name__.lower()
    if "norm" not in name and not isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return False
    if isinstance(module, BATCH_NORMS) or "batchnorm" in name or "groupnorm" in name:
        return False
    if next(module.children(), None) is not None:
        return False
    return all(dims(p) <= 1 for p in module.parameters(recurse=False))


def acts_as_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, or a wrapper that holds nothing but norms (PEFT's, torch.compile's)."""
    if is_norm(module):
        return True
    if not type(module).__module__.startswith(("peft.", f"{dynamo.PACKAGE}.")):
        return False
    owners = [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]
    return bool(owners) and all(is_norm(m) for m in owners)


def is_torch_norm(module: nn.Module) -> bool:
    """Whether a norm, or what it wraps, is torch's own, whose kernel wants input and weight in one dtype."""
    return any(isinstance(m, (nn.LayerNorm, nn.RMSNorm)) for m in module.modules())


def eps_name(module: nn.Module) -> str | None:
    """The plain attribute that holds a norm's eps; None where it has none, or keeps it behind a property."""
    for name in EPS_NAMES:
        if hasattr(inspect.getattr_static(type(module), name, None), "__get__"):
            continue
        value = getattr(module, name, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return name
    return None


def eps_of(module: nn.Module) -> float | None:
    """A norm's eps; None where it has none."""
    name = eps_name(module)
    return None if name is None else float(getattr(module, name))


def same_eps(a: float, b: float) -> bool:
    """Equal but for float32 rounding (a GGUF file says 9.999999974752427e-07 for 1e-6)."""
    return math.isclose(a, b, rel_tol=1e-6)


def untrained(module: nn.Module) -> bool:
    """Whether a norm is provably as it was made: weight all 1, bias all 0, and free to train.

    A norm without a weight, a frozen one (what follows it may have been trained on its output) and
    one whose weights are not loaded (meta) prove nothing. Nor does a half-precision weight of 1 alone: an
    optimizer step of 1e-3 is lost beside a 1 in bfloat16; a bias of 0 beside it would have moved.
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, torch.Tensor) or not weight.requires_grad:
        return False
    return (bias is not None or weight.dtype == torch.float32) and as_made(module)


def as_made(module: nn.Module) -> bool:
    """Whether a norm's weight is all 1 and its bias, if any, all 0. Not so for weights that are not loaded."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, torch.Tensor) or weight.is_meta:
        return False
    clean_bias = bias is None or (isinstance(bias, torch.Tensor) and not bool(bias.detach().any()))
    return bool((weight.detach() == 1).all()) and clean_bias
