"""A model's modules by the paths they had before any adapter: those that PEFT matches its target names against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from hfpatch.compat.modules import children, parameters
from hfpatch.model.walk import root_module
from hfpatch.model.wrapping import from_peft, unwrap


@dataclass(frozen=True)
class Place:
    """A module by its path before adapters; `wrapper` is what PEFT put in its place."""

    path: str
    module: nn.Module
    wrapper: nn.Module | None = None


def frame_of(given: object) -> nn.Module:
    """The module PEFT matches its names in: without PEFT's, torch.compile's and the parallel wrappers around it."""
    return unwrap(root_module(given))


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
        for name, child in children(inner).items():
            if child is not None:
                walk(f"{path}.{name}" if path else name, child)

    walk("", frame)
    return found


def without_adapter(module: nn.Module) -> nn.Module:
    """What PEFT's layers and wrappers around a module hold."""
    while True:
        inside = children(module)
        if "base_layer" in inside and (inner := unwrap(module, ("adapter",))) is not module:
            module = inner
            continue
        saved: nn.Module | None = None
        if "original_module" in inside and from_peft(type(module)):
            saved = inside["original_module"] or inside["token_adapter"]
        if saved is None:
            return module
        module = saved


def ancestors(path: str) -> Iterator[str]:
    """A path and those above it, the root left out."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's own parameters, by name; `named_parameters(recurse=False)` at a tenth of its cost."""
    return {name: p for name, p in parameters(module).items() if p is not None}
