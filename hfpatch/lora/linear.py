"""Which modules are linear maps, and which of them an adapter would not work on."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from functools import cache
from typing import Any

import torch
from torch import nn

from hfpatch.compat.modules import PARAMETERS, parameters
from hfpatch.compat.peft import layer_for, refuses
from hfpatch.lora.places import Place


def features(module: nn.Module) -> tuple[int, int] | None:
    """`(in, out)` of a linear map, quantised or GPT-2's Conv1D; None for anything else."""
    name = type(module).__name__
    if name == "Conv1D" and hasattr(module, "nf"):
        shape = tuple(module.weight.shape)  # pyright: ignore[reportArgumentType]
        return int(shape[0]), int(shape[1])
    if not isinstance(module, nn.Linear) and "linear" not in name.lower():
        return None
    for inputs, outputs in (("in_features", "out_features"), ("infeatures", "outfeatures")):
        sizes = getattr(module, inputs, None), getattr(module, outputs, None)
        if isinstance(sizes[0], int) and isinstance(sizes[1], int):
            inner = any(features(child) is not None for child in module.children())
            return None if inner else (sizes[0], sizes[1])
    return None


def refusal(kind: str, place: Place, parent: nn.Module) -> str:
    """Why an adapter on a linear map would be refused or passed by; empty where it would work.

    Args:
        kind: The `model_type` of the module PEFT would be given.
        place: The linear map.
        parent: The module that holds it.
    """
    name = place.path.rpartition(".")[2]
    if isinstance(parent, nn.MultiheadAttention):
        return "torch's MultiheadAttention multiplies by its weight itself, so an adapter would be passed by"
    if reads_weight(type(parent), name):
        return f"{type(parent).__name__} reads {name}.weight itself in one of its paths, past an adapter"
    if not _maps_as_linear(type(place.module), place.module):
        return f"the forward of {type(place.module).__name__} is not that of one linear map"
    return _refused_by_peft(kind, place, name)


@cache
def reads_weight(cls: type, name: str) -> bool:
    """Whether a class uses `self.<name>.weight` for more than its dtype or device, so that a wrapper is passed by."""
    if cls.__module__.startswith("torch."):
        return False
    return any(found == name for found in _weights_read(cls))


_READ = re.compile(r"(?<!isinstance\()\bself\.(\w+)\.weight\b(?!\.(?:dtype|device|is_cuda|split|shape)\b)(?!\[)")
"""Whole weights used as values. Slices are the emulation of old tensor-parallel training, off by default."""


@cache
def _weights_read(cls: type) -> tuple[str, ...]:
    return tuple(_READ.findall(source(cls)))


@cache
def multiplies(cls: type, name: str) -> bool:
    """Whether a class multiplies by its own parameter `self.<name>`, as a linear map does by its weight."""
    product = r"(?:linear|matmul|einsum|bmm|baddbmm|addmm|mm)\("
    own = rf"self\.{re.escape(name)}\b"
    return re.search(rf"{product}[^()]*{own}|@ *{own}|{own}\.(?:T|t\(\)|transpose)|{own} *@", source(cls)) is not None


@cache
def source(cls: type) -> str:
    """Source of a class and of those of its bases that are not torch's; empty where there is none to read."""
    bases = [c for c in cls.__mro__ if c is not object and not c.__module__.startswith("torch.")]
    return "\n".join(_source_of(c) for c in bases)


@cache
def _source_of(cls: type) -> str:
    try:
        if "." in cls.__qualname__:
            return inspect.getsource(cls)
        text = inspect.getsource(sys.modules[cls.__module__])  # of a class it parses its whole file, each time
    except (OSError, TypeError, KeyError):
        return ""
    found = re.search(rf"^class {re.escape(cls.__name__)}\b.*?(?=^[^\s#)]|\Z)", text, re.MULTILINE | re.DOTALL)
    return "" if found is None else found.group()


_LINEAR: dict[type, bool] = {}


def _maps_as_linear(cls: type, module: nn.Module) -> bool:
    """Whether a class derived from `nn.Linear` with a forward of its own still maps `[..., in]` to `[..., out]`."""
    if not isinstance(module, nn.Linear) or cls.forward is nn.Linear.forward:
        return True
    if not cls.__module__.startswith("transformers.models.") and not cls.__module__.startswith("transformers_modules."):
        return True  # a quantised class: PEFT has a layer of its own for it, or takes it as a plain one
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
        return f"PEFT refuses {name} in a model of type {kind}"
    if place.wrapper is not None or isinstance(place.module, nn.Linear) or type(place.module).__name__ == "Conv1D":
        return ""
    return _class_refused(place.module)


def _class_refused(module: nn.Module) -> str:
    """Ask PEFT for a layer around a module of a foreign class; the module itself stays as it is."""
    try:
        with torch.random.fork_rng(devices=[]):
            layer_for(module)
    except (ValueError, TypeError, AttributeError, ImportError, RuntimeError, KeyError):
        return f"this PEFT has no layer for a {type(module).__name__}"
    return ""
