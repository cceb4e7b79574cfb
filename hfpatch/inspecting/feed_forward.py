"""The feed-forward parts of a stack: MLPs and experts, by structure.

Such a part is the module that holds linear maps and an activation between them, or the stacked weights of experts.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from torch import nn

from hfpatch.lora.linear import features
from hfpatch.model.code import tree_of
from hfpatch.model.roles import Place, Stack
from hfpatch.model.walk import dims, is_stock

ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
"""Modules whose classes are activations, if they have no parameters."""
NOT_ELEMENTWISE = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU, nn.MultiheadAttention)


@dataclass(frozen=True)
class FeedForward:
    """An MLP, a module of experts, or a layer whose own children are an MLP (OPT, Whisper).

    Attributes:
        path: Path of the module.
        module: The module.
        activation: The activation in it; None for experts without such a module.
        maps: The linear maps in it, without adapters, in the order of the module; empty for stacked experts.
        gated: True if its own forward multiplies or sums: by a gate, or over experts.
        of_layer: True if the module is the layer itself.
        around: The module in the layer that holds this one and casts what it returns to a narrower dtype again, or this
            module itself: what has to compute in float32, if the part is not scaled.
        why_not_scaled: Why its output is not proportional to the output of its activation, or why scaling that would
            not help; empty if it is.
    """

    path: str
    module: nn.Module
    activation: Place | None
    maps: tuple[Place, ...]
    gated: bool
    of_layer: bool
    around: Place
    why_not_scaled: str

    @property
    def name_of_activation(self) -> str:
        """Name of the activation among the children of the module; empty if there is none."""
        return self.activation[0].rpartition(".")[2] if self.activation else ""

    @property
    def name_of_last(self) -> str:
        """Name of the child of the module that is or holds the last map; empty for stacked experts."""
        return self.maps[-1][0].removeprefix(f"{self.path}.").partition(".")[0] if self.maps else ""

    @property
    def early(self) -> tuple[str, ...]:
        """Paths of the activation and of the maps before it."""
        activation = () if self.activation is None else (self.activation[0],)
        return *activation, *(path for path, _ in self.maps[:-1])

    @property
    def places(self) -> tuple[str, ...]:
        """Paths of all modules whose values count as those of this part."""
        return *((self.path,) if self.gated else ()), *self.early, *(path for path, _ in self.maps[-1:])


def feed_forwards(stack: Stack) -> Iterator[FeedForward]:
    """Yield the feed-forward parts of a stack's layers, in the order of the modules."""
    for layer_path, layer in stack.layers:
        for name, module in layer.named_modules():
            path = f"{layer_path}.{name}" if name else layer_path
            activations = [(f"{path}.{n}", child) for n, child in module.named_children() if is_activation(child)]
            if len(activations) > 1:
                continue
            maps = tuple(_maps(path, module)) if activations else ()
            kind = _kind(module, maps)
            if kind:
                activation = activations[0] if activations else None
                around = _around(layer_path, layer, name)
                casts = "" if around[0] == path else f"{around[0]} casts what it returns"
                why_not = casts or _why_not_scaled(module, activation, maps, kind)
                yield FeedForward(path, module, activation, maps, kind != "plain", not name, around, why_not)


def is_activation(module: nn.Module) -> bool:
    """True if a module is an elementwise activation without parameters, of torch, transformers or a model's own."""
    if next(module.parameters(), None) is not None or isinstance(module, NOT_ELEMENTWISE):
        return False
    name = type(module).__name__.lower()
    return type(module).__module__ in ACTIVATIONS or name.endswith(("gelu", "silu", "relu", "activation"))


def _maps(path: str, module: nn.Module) -> Iterator[Place]:
    """Yield the linear maps that are children of a module; of one with an adapter, the map inside it."""
    for name, child in module.named_children():
        for inner, each in child.named_modules():
            own = inner in ("", "base_layer") or inner.endswith(".base_layer")
            if own and "lora_" not in inner and features(each) is not None:
                yield f"{path}.{name}{'.' if inner else ''}{inner}", each


def _around(layer_path: str, layer: nn.Module, name: str) -> Place:
    """Return the outermost module between a layer and a part of it whose forward casts its result, else the part."""
    names = name.split(".") if name else []
    holders = [".".join(names[:depth]) for depth in range(1, len(names))]
    found = next((holder for holder in holders if casts_result(type(layer.get_submodule(holder)))), name)
    return (f"{layer_path}.{found}" if found else layer_path), layer.get_submodule(found)


@cache
def casts_result(cls: type[nn.Module]) -> bool:
    """True if a forward of transformers casts a value to the dtype of another: `final.to(hidden_states.dtype)`."""
    tree = tree_of(cls.forward) if is_stock(cls) else None
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call)) if tree is not None else ()
    casts = (c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr in ("to", "type_as"))
    given = (value for call in casts for value in (*call.args, *(k.value for k in call.keywords)))
    return any(isinstance(value, ast.Attribute) and value.attr == "dtype" for value in given)


def _kind(module: nn.Module, maps: tuple[Place, ...]) -> str:
    """Return `experts` for stacked weights, `plain` or `gated` if the last map reads what the others write; else ``."""
    if sum(dims(p) == 3 for p in module.parameters(recurse=False)) > 1:
        return "experts"
    if len(maps) < 2:
        return ""
    *before, last = [features(m) or (0, 0) for _, m in maps]
    written = sum(out for _, out in before)
    if any(given != last[1] for given, _ in before):
        return ""
    return "plain" if written == last[0] else "gated" if written == 2 * last[0] else ""


def _why_not_scaled(module: nn.Module, activation: Place | None, maps: tuple[Place, ...], kind: str) -> str:
    if activation is None:
        return "its activation is no module"
    if kind == "experts":
        biased = [n for n, _ in module.named_parameters(recurse=False) if "bias" in n]
        return f"its experts add {biased[0]}" if biased else ""
    known = {id(m) for _, m in maps}
    for name, child in module.named_children():
        inner = [m for m in child.modules() if next(m.parameters(recurse=False), None) is not None]
        if inner and not any(id(m) in known for m in child.modules()):
            return f"it holds {name}, a {type(child).__name__}"
    if any(getattr(m, "bias", None) is not None for m in _last(module, maps).modules()):
        return "its last map adds a bias"
    if kind == "plain":
        return "it has no gate, so what overflows is a map or the activation itself"
    return ""


def _last(module: nn.Module, maps: tuple[Place, ...]) -> nn.Module:
    """Return the child of a module that is its last map, with the adapters around it."""
    return next(child for child in module.children() if any(m is maps[-1][1] for m in child.modules()))
