"""Linear maps, and the reasons why an adapter would not work on one."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from functools import cache
from numbers import Integral
from typing import Any

import torch
from torch import nn

from hfpatch.compat.modules import PARAMETERS, parameters
from hfpatch.compat.peft import layer_for, refuses
from hfpatch.lora.places import Place


def features(module: nn.Module) -> tuple[int, int] | None:
    """Return `(in, out)` of a linear map, also if quantised or GPT-2's Conv1D; None for other modules."""
    name = type(module).__name__
    if name == "Conv1D" and hasattr(module, "nf"):
        shape = tuple(module.weight.shape)  # pyright: ignore[reportArgumentType]
        return int(shape[0]), int(shape[1])
    if not isinstance(module, nn.Linear) and "linear" not in name.lower():
        return None
    for inputs, outputs in (("in_features", "out_features"), ("infeatures", "outfeatures")):
        sizes = getattr(module, inputs, None), getattr(module, outputs, None)
        if isinstance(module, nn.Linear) and torch.Tensor in map(type, sizes) and module.weight.dim() == 2:
            sizes = tuple(module.weight.shape)[::-1]  # of a model that computes its widths with torch (Inkling)
        if isinstance(sizes[0], Integral) and isinstance(sizes[1], Integral):  # NumPy's, too
            inner = any(features(child) is not None for child in module.children())
            return None if inner else (int(sizes[0]), int(sizes[1]))
    return None


def refusal(kind: str, place: Place, parent: nn.Module) -> str:
    """Return why an adapter on a linear map would be refused or bypassed; empty if it would work.

    Args:
        kind: The `model_type` of the model that PEFT would be given.
        place: The linear map.
        parent: The module that holds it.
    """
    name = place.path.rpartition(".")[2]
    if isinstance(parent, nn.MultiheadAttention):
        return "torch's MultiheadAttention uses its weight directly, which would bypass an adapter"
    if reads_weight(type(parent), name):
        return f"{type(parent).__name__} uses {name}.weight directly, which would bypass an adapter"
    if not _maps_as_linear(type(place.module), place.module):
        return f"the forward of {type(place.module).__name__} is not that of one linear map"
    return _refused_by_peft(kind, place, name)


@cache
def reads_weight(cls: type, name: str) -> bool:
    """True if a class uses the values of `self.<name>.weight`, which bypasses a wrapper, not just dtype or device."""
    if cls.__module__.startswith("torch."):
        return False
    return any(found == name for found in _weights_read(cls))


_READ = re.compile(r"(?<!isinstance\()\bself\.(\w+)\.weight\b(?!\.(?:dtype|device|is_cuda|split|shape)\b)(?!\[)")
"""Full weights used as values. Slices emulate old tensor-parallel training, which is off by default."""


@cache
def _weights_read(cls: type) -> tuple[str, ...]:
    return tuple(_READ.findall(source(cls)))


@cache
def multiplies(cls: type, name: str) -> bool:
    """True if a class multiplies by its parameter `self.<name>`, as a linear map does by its weight."""
    product = r"(?:linear|matmul|einsum|bmm|baddbmm|addmm|mm)\("
    own = rf"self\.{re.escape(name)}\b"
    return re.search(rf"{product}[^()]*{own}|@ *{own}|{own}\.(?:T|t\(\)|transpose)|{own} *@", source(cls)) is not None


@cache
def source(cls: type) -> str:
    """Return the source of a class and its bases, without torch's; empty if it cannot be read."""
    bases = [c for c in cls.__mro__ if c is not object and not c.__module__.startswith("torch.")]
    return "\n".join(_source_of(c) for c in bases)


@cache
def _source_of(cls: type) -> str:
    try:
        if "." in cls.__qualname__:
            return inspect.getsource(cls)
        text = inspect.getsource(sys.modules[cls.__module__])  # for a class, getsource parses the whole file each time
    except (OSError, TypeError, KeyError):
        return ""
    found = re.search(rf"^class {re.escape(cls.__name__)}\b.*?(?=^[^\s#)]|\Z)", text, re.MULTILINE | re.DOTALL)
    return "" if found is None else found.group()


_LINEAR: dict[type, bool] = {}


def _maps_as_linear(cls: type, module: nn.Module) -> bool:
    """True unless a subclass of `nn.Linear` has a forward that does not map `[..., in]` to `[..., out]`."""
    if not isinstance(module, nn.Linear) or cls.forward is nn.Linear.forward:
        return True
    if not cls.__module__.startswith("transformers.models.") and not cls.__module__.startswith("transformers_modules."):
        return True  # a quantised class: PEFT has a layer for it, or treats it as a plain one
    if cls not in _LINEAR:
        shell = copy.copy(module)
        shell.__dict__[PARAMETERS] = {
            k: None if p is None else nn.Parameter(torch.empty(p.shape, device="meta"), requires_grad=False)
            for k, p in parameters(module).items()
        }
        try:
            out: Any = cls.forward(shell, torch.empty(2, 3, module.in_features, device="meta"))
            _LINEAR[cls] = out.shape == (2, 3, module.out_features)
        except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
            _LINEAR[cls] = False
    return _LINEAR[cls]


def _refused_by_peft(kind: str, place: Place, name: str) -> str:
    if refuses(name, kind):
        return f"PEFT does not adapt {name} in a model of type {kind}"
    if place.wrapper is not None or isinstance(place.module, nn.Linear) or type(place.module).__name__ == "Conv1D":
        return ""
    return _class_refused(place.module)


def _class_refused(module: nn.Module) -> str:
    """Return why PEFT has no layer for a module, by asking for one; empty if it has. The module is not changed."""
    try:
        with torch.random.fork_rng(devices=[]):
            layer_for(module)
    except (ValueError, TypeError, AttributeError, ImportError, RuntimeError, KeyError):
        return f"the installed PEFT has no layer for {type(module).__name__}"
    return ""
