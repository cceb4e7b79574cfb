"""Which modules are linear maps, and which of them an adapter would not work on."""

from __future__ import annotations

import copy
import inspect
import re
from functools import cache
from typing import Any

import torch
from torch import nn

from hfpatch.model.lora_places import Place


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


def refusal(frame: nn.Module, place: Place, parent: nn.Module) -> str:
    """Why an adapter on a linear map would be refused or passed by; empty where it would work.

    Args:
        frame: The module PEFT would be given.
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
    return _refused_by_peft(frame, place, name)


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
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):
        return ()
    return tuple(_READ.findall(source))


_LINEAR: dict[type, bool] = {}


def _maps_as_linear(cls: type, module: nn.Module) -> bool:
    """Whether a class derived from `nn.Linear` with a forward of its own still maps `[..., in]` to `[..., out]`."""
    if not isinstance(module, nn.Linear) or cls.forward is nn.Linear.forward:
        return True
    if not cls.__module__.startswith("transformers.models.") and not cls.__module__.startswith("transformers_modules."):
        return True  # a quantised class: PEFT has a layer of its own for it, or takes it as a plain one
    if cls not in _LINEAR:
        shell = copy.copy(module)
        shell.__dict__["_parameters"] = {
            k: None if p is None else nn.Parameter(torch.empty(p.shape, device="meta"), requires_grad=False)
            for k, p in module.__dict__["_parameters"].items()
        }
        try:
            out: Any = cls.forward(shell, torch.empty(2, 3, module.in_features, device="meta"))
            _LINEAR[cls] = out.shape == (2, 3, module.out_features)
        except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
            _LINEAR[cls] = False
    return _LINEAR[cls]


def _refused_by_peft(frame: nn.Module, place: Place, name: str) -> str:
    from peft import LoraConfig
    from peft.tuners import tuners_utils

    check: Any = getattr(tuners_utils, "_check_lora_target_modules_mamba", None)
    if check is not None and name in {"out_proj", "conv1d"}:
        try:
            check(LoraConfig(), frame, name)
        except ValueError:
            return (
                f"PEFT refuses {name} in a model of type {getattr(getattr(frame, 'config', None), 'model_type', None)}"
            )
    if place.wrapper is not None or isinstance(place.module, nn.Linear) or type(place.module).__name__ == "Conv1D":
        return ""
    return _class_refused(place.module)


def _class_refused(module: nn.Module) -> str:
    """Ask PEFT for a layer around a module of a foreign class; the module itself stays as it is."""
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    make: Any = LoraModel._create_new_module  # pyright: ignore[reportPrivateUsage]
    words = {"r": 1, "lora_alpha": 1, "device_map": {}, "loaded_in_8bit": False, "loaded_in_4bit": False}
    try:
        with torch.random.fork_rng(devices=[]):
            make(LoraConfig(r=1), "probe", module, target_name="probe", **words)
    except (ValueError, TypeError, AttributeError, ImportError, RuntimeError, KeyError):
        return f"this PEFT has no layer for a {type(module).__name__}"
    return ""
