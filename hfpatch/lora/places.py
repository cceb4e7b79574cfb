"""A model's modules by the paths they had before any adapter: those that PEFT matches its target names against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from torch import nn

from hfpatch.model.walk import root_module


@dataclass(frozen=True)
class Place:
    """A module by its path before adapters; `wrapper` is what PEFT put in its place."""

    path: str
    module: nn.Module
    wrapper: nn.Module | None = None


def frame_of(given: object) -> nn.Module:
    """The module PEFT matches its names in: without PEFT's, torch.compile's and the parallel wrappers around it."""
    module = root_module(given)
    while True:
        held = module.__dict__["_modules"]
        inner = held.get("_orig_mod") or held.get("_fsdp_wrapped_module")
        if inner is None and type(module).__module__.startswith("torch.nn.parallel"):
            inner = held.get("module")
        if inner is None and "base_model" in held and from_peft(type(module)):
            inner = held["base_model"]
        if inner is None and is_tuner(module):
            inner = held["model"]
        if inner is None:
            return module
        module = inner


def is_tuner(module: nn.Module) -> bool:
    """Whether a module is PEFT's manager of adapters (`LoraModel` and its like), which holds the model."""
    return "model" in module.__dict__["_modules"] and _manages(type(module))


@cache
def _manages(cls: type) -> bool:
    return any(base.__name__ == "BaseTuner" and base.__module__.startswith("peft.") for base in cls.__mro__)


@cache
def from_peft(cls: type) -> bool:
    """Whether a class is PEFT's, or derived from one."""
    return any(base.__module__.startswith("peft.") for base in cls.__mro__)


def places(frame: nn.Module) -> dict[str, Place]:
    """Every module under a frame by its path before adapters, in the model's order, each once."""
    found: dict[str, Place] = {}
    seen: set[int] = set()

    def walk(path: str, module: nn.Module) -> None:
        outer, inner = module, without_adapter(module)
        if id(inner) in seen:
            return
        seen.add(id(inner))
        found[path] = Place(path, inner, outer if outer is not inner else None)
        for name, child in inner.__dict__["_modules"].items():
            if child is not None:
                walk(f"{path}.{name}" if path else name, child)

    walk("", frame)
    return found


def without_adapter(module: nn.Module) -> nn.Module:
    """What PEFT's layers and wrappers around a module hold."""
    while True:
        held = module.__dict__["_modules"]
        if "base_layer" in held and hasattr(type(module), "adapter_layer_names"):
            module = held["base_layer"]
        elif "original_module" in held and from_peft(type(module)):
            module = held["original_module"] or held["token_adapter"]
        else:
            return module


def ancestors(path: str) -> Iterator[str]:
    """A path and those above it, the root left out."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's own parameters, by name; `named_parameters(recurse=False)` at a tenth of its cost."""
    return {name: p for name, p in module.__dict__["_parameters"].items() if p is not None}
