"""Wrappers around a model or a part of it: the kind of a wrapper, and the module it holds."""

from __future__ import annotations

import re

from torch import nn

from hfpatch.compat.modules import children
from hfpatch.compat.wrappers import CHECKPOINTED, CLASSES, COMPILED, SHARDED

PARALLEL = ("DDP", "DataParallel")
"""Wrappers that communicate with other ranks or devices when they are called."""

RUN_AGAIN = (*PARALLEL, "torch.compile")
"""Wrappers that a call is made again without: they talk to other ranks or devices, or compile."""

EVERY = (*PARALLEL, "FSDP", "torch.compile", "checkpoint", "PEFT")
"""Wrappers around a model; `unwrap` removes all of them by default."""

ON_LAYERS = ("torch.compile", "checkpoint")
"""Wrappers around single layers that do not change their computation."""

_NAMED = ((COMPILED, "torch.compile"), (SHARDED, "FSDP"), (CHECKPOINTED, "checkpoint"))

_IN_PATHS = frozenset(name for name, _ in _NAMED)
_IN_A_PATH = re.compile("|".join(_IN_PATHS))


def unwrap(module: nn.Module, kinds: tuple[str, ...] = EVERY) -> nn.Module:
    """Return the module inside its wrappers of these kinds; the module itself if it has none."""
    return unwrapped("", module, kinds)[1]


def unwrapped(path: str, module: nn.Module, kinds: tuple[str, ...] = EVERY) -> tuple[str, nn.Module]:
    """Return the module inside its wrappers of these kinds, with its path.

    Args:
        path: Path of the module.
        module: The module.
        kinds: Kinds of `EVERY`, or `adapter` for PEFT's layer around a layer of the model.
    """
    while (found := held(module)) is not None and found[0] in kinds:
        _, name, module = found
        path = f"{path}.{name}" if path else name
    return path, module


def held(wrapper: nn.Module) -> tuple[str, str, nn.Module] | None:
    """Return the kind of a wrapper, and the name and the module it holds; None if a module is not a wrapper."""
    inside = children(wrapper)
    for name, kind in _NAMED:
        if (inner := inside.get(name)) is not None:
            return kind, name, inner
    cls = type(wrapper)
    if (inner := inside.get("module")) is not None and (kind := kind_of(cls)) in PARALLEL:
        return kind, "module", inner
    if (inner := inside.get("base_model")) is not None and from_peft(cls):
        return "PEFT", "base_model", inner
    if (inner := inside.get("model")) is not None and is_tuner(cls):
        return "PEFT", "model", inner
    if (inner := inside.get("base_layer")) is not None and hasattr(cls, "adapter_layer_names"):
        return "adapter", "base_layer", inner
    return None


def kind_of(cls: type) -> str | None:
    """Return the kind of wrapper that a class is, FSDP2 included; None if it is not in `compat.wrappers.CLASSES`."""
    for base in cls.__mro__:
        if (kind := CLASSES.get(f"{base.__module__}.{base.__qualname__}")) is not None:
            return kind
    return None


def joined(path: str, name: str) -> str:
    """Return the path of what is at `name` in the module at `path`; either may be empty, for the module itself."""
    return f"{path}.{name}" if path and name else path or name


def plain(path: str, *also: str) -> str:
    """Return a path without the names that compiling, sharding and checkpointing insert, and those in `also`."""
    if not also and _IN_A_PATH.search(path) is None:
        return path
    return ".".join(name for name in path.split(".") if name not in _IN_PATHS and name not in also)


def from_peft(cls: type) -> bool:
    """True if a class is defined by PEFT, or derived from such a class."""
    return any(base.__module__.startswith("peft.") for base in cls.__mro__)


def is_tuner(cls: type) -> bool:
    """True if a class is a PEFT tuner, such as `LoraModel`: it holds the model and manages its adapters."""
    return any(base.__name__ == "BaseTuner" and base.__module__.startswith("peft.") for base in cls.__mro__)
