"""The roles of the parts of a decoder, from structure and not from names.

The residual stream runs through the items of one `ModuleList`. Of an item's children, the norms work on
the stream and everything else with weights is a branch; the norm beside the list ends the stream. An encoder and a
decoder have a stream each. If a user's module holds a decoder layer and adds modules, the inner layer counts as the
layer, and the module around it as its wrapper.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from hfpatch.compat.loading import kept_wide
from hfpatch.model.code import is_self, tree_of
from hfpatch.model.embed import find_embedding
from hfpatch.model.norms import acts_as_norm
from hfpatch.model.reads import begins_with_norm, calls, parts, reading_of
from hfpatch.model.walk import TOOL_PACKAGES, Submodel, Walk, elements, inside, is_stock
from hfpatch.model.wrapping import ON_LAYERS, unwrap, unwrapped

Place = tuple[str, nn.Module]


@dataclass(frozen=True)
class Stack:
    """One residual stream: its decoder layers and their parts, each with its path."""

    path: str
    items: tuple[Place, ...]
    """Items of the list: the layers, or containers of a few layers each, as in T5."""
    layers: tuple[Place, ...]
    layer_norms: tuple[Place, ...]
    branch_out_norms: tuple[Place, ...]
    """Layer norms applied to a branch's output before it is added to the stream."""
    branches: tuple[Place, ...]
    final_norm: Place | None
    readers: tuple[Place, ...] = ()
    """Branches, or the parts of one that begins with a norm, that read the output of a norm."""
    raw_readers: tuple[Place, ...] = ()
    """Branches, or parts of one, that read the stream itself: OLMo 2's attention, Gemma 4's gates."""
    wrappers: tuple[tuple[Place, Place], ...] = ()
    """Items that are a user's module around a layer, each with the layer in it."""

    def around(self) -> Iterator[Place]:
        """Yield the modules with weights that a user's wrappers hold beside the layers."""
        for (path, wrapper), (layer, _) in self.wrappers:
            for name, module in wrapper.named_modules():
                place = f"{path}.{name}"
                if name and not inside(place, layer) and next(module.parameters(recurse=False), None) is not None:
                    yield place, module


def stacks(walk: Walk, submodel: Submodel) -> tuple[Stack, ...]:
    """Return the stacks of a submodel, a decoder's last; empty if it has no list of this shape."""
    return tuple(_stack(walk, *found) for found in _layer_lists(walk, submodel))


def stock_path(path: str, homes: Mapping[str, str]) -> str:
    """Return the path that a module has in the stock model, without users' modules around layers.

    Args:
        path: A path from the root.
        homes: Paths of the layers inside users' modules -> their paths in the stock model.
    """
    outer = path if homes else ""
    while outer and outer not in homes:
        outer = outer.rpartition(".")[0]
    return f"{homes[outer]}{path[len(outer) :]}" if outer else path


def _stack(walk: Walk, list_path: str, items: list[Place]) -> Stack:
    layers = [block for item in items for block in _blocks(*item)]
    held = _Parts()
    for place in layers:
        held.add(*unwrapped(*place, ON_LAYERS))
    found = ((unwrapped(*item, ON_LAYERS), layer_of_item(*item) or item) for item in items)
    wrappers = tuple((item, layer) for item, layer in found if layer[1] is not item[1] and inside(layer[0], item[0]))
    return Stack(
        list_path,
        tuple(items),
        tuple(layers),
        tuple(held.norms),
        tuple(held.after),
        tuple(held.branches),
        _final_norm(walk, list_path),
        tuple(held.readers),
        tuple(held.raw),
        wrappers,
    )


class _Parts:
    """The parts of the layers of a stack, by role."""

    def __init__(self) -> None:
        self.norms: list[Place] = []
        self.after: list[Place] = []
        self.branches: list[Place] = []
        self.readers: list[Place] = []
        self.raw: list[Place] = []

    def add(self, path: str, layer: nn.Module, *, whole: bool = True) -> None:
        """Add the parts of a layer, or of a branch that begins with a norm (not `whole`)."""
        out, reading = out_norms(type(layer)), reading_of(layer)
        for part in parts(layer):
            place = (f"{path}.{part.name}", part.module)
            raw = part.called in reading.stream | reading.methods
            if acts_as_norm(part.module):
                if whole or raw:
                    self.norms.append(place)
                if whole and (out is None or part.called in out):
                    self.after.append(place)
            elif next(part.module.parameters(), None) is not None:
                if whole:
                    self.branches.append(place)
                if begins_with_norm(part.module):
                    self.add(*unwrapped(*place, ON_LAYERS), whole=False)
                else:
                    (self.raw if raw else self.readers).append(place)


def _final_norm(walk: Walk, list_path: str) -> Place | None:
    """Return the norm beside a list of layers that ends the stream: the last that the forward calls; None if none."""
    parent = list_path.rpartition(".")[0]
    module = walk.modules[parent]
    beside = {name: child for name, child in module.named_children() if acts_as_norm(child)}
    if not beside:
        return None
    called = [name for name in calls(type(module)) if name in beside]
    name = called[-1] if called else list(beside)[-1]
    return f"{parent}.{name}" if parent else name, beside[name]


@cache
def out_norms(layer: type[nn.Module]) -> frozenset[str] | None:
    """Return the names of the norms that a layer's forward applies to the output of another child, before any sum.

    Read from the source, in its order: after `y = self.mlp(x)`, `self.post_norm(y)` is one; after `y = residual + y`
    it reads the stream, and also if the child was given the residual to add. None if the source cannot be read.
    """
    tree = tree_of(layer.forward)
    if tree is None:
        return None
    found: set[str] = set()
    _follow(getattr(tree, "body", []), set(), found)
    return frozenset(found)


def _follow(statements: Iterable[ast.stmt], outputs: set[str], found: set[str]) -> set[str]:
    """Collect the norms called on a branch's output; return the variables that hold such outputs afterwards."""
    for statement in statements:
        if isinstance(statement, ast.If):
            ways = [_follow(way, outputs, found) for way in (statement.body, statement.orelse)]
            outputs = ways[0] | ways[1]
            continue
        for node in () if hasattr(statement, "body") else ast.walk(statement):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_self(node.func.value):
                given = [*node.args, *(keyword.value for keyword in node.keywords)]
                if "norm" in node.func.attr and given and _from_branch(given[0], outputs):
                    found.add(node.func.attr)
        if isinstance(statement, ast.Assign):
            names = {n.id for target in statement.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
            outputs = outputs | names if _from_branch(statement.value, outputs) else outputs - names
        elif isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            outputs = outputs - {statement.target.id}
        else:
            outputs = _follow(getattr(statement, "body", ()), outputs, found)
    return outputs


def _from_branch(value: ast.expr, outputs: set[str]) -> bool:
    """True if a value is a branch's output, called here or assigned before, possibly passed through dropout."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return False
    if isinstance(value, ast.Name):
        return value.id in outputs
    if isinstance(value, ast.Call) and any(isinstance(n, ast.Name) and n.id == "residual" for n in ast.walk(value)):
        return False
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and is_self(value.func.value):
        if "norm" in value.func.attr:
            return False
        passes_on = "dropout" in value.func.attr
        return not passes_on or any(_from_branch(a, outputs) for a in value.args)
    return any(_from_branch(child, outputs) for child in ast.iter_child_nodes(value) if isinstance(child, ast.expr))


DEPTHS = ("encoder_layers", "decoder_layers", "num_decoder_layers")
"""Config keys for the number of layers, if encoder and decoder have one each."""


def _layer_lists(walk: Walk, submodel: Submodel) -> list[tuple[str, list[Place]]]:
    """Return the lists of blocks nearest to the submodel's root, as long as the config's number of layers if any is.

    Lists in inner submodels do not count. Unless the config has several depths, those are returned that have the same
    classes as the first.
    """
    config = submodel.model.config
    depths = [d for k in ("num_hidden_layers", *DEPTHS) if isinstance(d := getattr(config, k, None), int)]
    found: list[tuple[str, list[Place]]] = []
    for path, module in walk.own(submodel):
        if not isinstance(module, nn.ModuleList) or len(module) == 0:
            continue
        if any(name.isdigit() for name in path[len(submodel.path) :].split(".")):  # a list inside a block
            continue
        items = [(f"{path}.{name}", item) for name, item in module.named_children()]
        if all(_blocks(*item) for item in items):
            found.append((path, items))
    long = [each for each in found if len(each[1]) >= min(depths, default=0)]
    found = long or [each for each in found if len(each[1]) > 1]
    nearest = min((path.count(".") for path, _ in found), default=0)
    found = [each for each in found if each[0].count(".") == nearest]
    if len(depths) > 1:
        return found
    kinds = {type(item) for _, item in found[0][1]} if found else set[type]()  # Llama 3.2's two lists of image layers
    return [each for each in found if {type(item) for _, item in each[1]} == kinds]


def why_unreadable(walk: Walk, submodel: Submodel) -> str:
    """Return why the list of a submodel's layers cannot be read, naming the item at fault; empty if no item is."""
    for path, module in walk.own(submodel):
        if not isinstance(module, nn.ModuleList) or any(n.isdigit() for n in path[len(submodel.path) :].split(".")):
            continue
        items = [(f"{path}.{name}", item) for name, item in module.named_children()]
        read = [bool(_blocks(*item)) for item in items]
        for (place, item), found in zip(items, read, strict=True):
            held = len({id(layer) for _, layer in _layers_inside(place, item)})
            if not found and (held or any(read)):
                several = f"holds {held} decoder layers, and which of them it runs is unknown"
                return f"{place} is a {type(item).__name__}, which {several if held else 'holds no decoder layer'}"
    return ""


def layer_of_item(path: str, item: nn.Module) -> Place | None:
    """Return the layer that a list item is, or the one inside a user's module; None if that holds several layers."""
    _, module = unwrapped(path, item, ON_LAYERS)
    own = own_class(module)
    if f"{own.__module__}.".startswith(TOOL_PACKAGES) or is_stock(own):
        return path, item
    if _forward_is_stock(module) and _parts(path, item):  # a subclass of a layer
        return path, item
    held = {id(layer): (place, layer) for place, layer in reversed(list(_layers_inside(path, item)))}
    if len(held) > 1:
        return None
    return next(iter(held.values()), (path, item))


def _layers_inside(path: str, module: nn.Module) -> Iterator[Place]:
    """Yield the outermost transformers layers in a module; an attention module with norms is not a layer."""
    path, module = unwrapped(path, module, ON_LAYERS)
    for name, child in module.named_children():
        place = (f"{path}.{name}", child)
        inner = unwrap(child, ON_LAYERS)
        if _forward_is_stock(inner) and _parts(*place) and not _is_attention(inner):
            yield place
        else:
            yield from _layers_inside(*place)


def _forward_is_stock(module: nn.Module) -> bool:
    """True if transformers wrote a forward of a module's class or of one of its bases, even if it is overridden."""
    return any(is_stock(cls) and "forward" in cls.__dict__ for cls in type(module).__mro__)


def own_class(module: nn.Module) -> type:
    """Return a module's class; if FSDP2 derived it, the original class."""
    return next(c for c in type(module).__mro__ if not c.__module__.startswith("torch.distributed.fsdp"))


def _is_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower() and not type(module).__name__.endswith(("Layer", "Block"))


def _blocks(path: str, item: nn.Module) -> list[Place]:
    """Return the block that a list item is or holds, or its parts if they are blocks (T5); empty otherwise."""
    layer = layer_of_item(path, item)
    return [] if layer is None else _parts(*layer)


def _parts(path: str, item: nn.Module) -> list[Place]:
    if is_block(item):
        return [(path, item)]
    path, item = unwrapped(path, item, ON_LAYERS)
    held = [(f"{path}.{name}", part) for name, part in item.named_children()]
    if len(held) == 1 and isinstance(held[0][1], nn.ModuleList):
        held = [(f"{held[0][0]}.{name}", part) for name, part in held[0][1].named_children()]
    if held and all(is_block(part) for _, part in held):
        return held
    return [(path, item)] if _norms_inside(item) else []


def _norms_inside(item: nn.Module) -> bool:
    """True if a norm in a list, or in a part that begins with one, reads what a layer of transformers is given."""
    if not is_stock(own_class(item)):
        return False
    reading = reading_of(item).stream
    return any(
        acts_as_norm(p.module) or begins_with_norm(p.module) for p in parts(item) if p.called in reading
    ) and any(not acts_as_norm(p.module) and next(p.module.parameters(), None) is not None for p in parts(item))


def is_block(module: nn.Module) -> bool:
    """True if a module has a norm and a branch among its children."""
    children = list(unwrap(module, ON_LAYERS).children())
    return any(acts_as_norm(c) for c in children) and any(
        not acts_as_norm(c) and any(True for _ in c.parameters()) for c in children
    )


def stream_dtype(walk: Walk, submodel: Submodel, found: Stack) -> torch.dtype | None:
    """Return the dtype of the residual stream, to which embeddings and branch outputs promote; None without weights.

    Mixed weights avoid overflow by this promotion: bfloat16 embeddings and float16 branches give a float32 stream.
    """
    dtypes: list[torch.dtype] = []
    embedding = find_embedding(submodel.model)
    weight = getattr(embedding, "weight", None)
    if isinstance(weight, torch.Tensor):
        dtypes.append(weight.dtype)
    first = f"{found.layers[0][0]}."
    kept = kept_wide(submodel.model)[1]  # these return the dtype they are given
    for path, branch in found.branches:
        if not path.startswith(first) or path.rpartition(".")[2] in kept:
            continue
        if (dtype := weights_dtype(branch)) is not None:
            dtypes.append(dtype)
    floating = [d for d in dtypes if d.is_floating_point]
    if not floating:
        return None
    out = floating[0]
    for dtype in floating[1:]:
        out = torch.promote_types(out, dtype)
    return out


def weights_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of most of a module's floating-point weights, without LoRA's; None if it has none."""
    counts: dict[torch.dtype, int] = {}
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and "lora_" not in name:
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + elements(parameter)
    return max(counts, key=lambda d: counts[d]) if counts else None
