"""What the parts of a decoder are for, told from structure and not from names.

The residual stream runs through the items of one `ModuleList`. Of an item's children, the norms work on
the stream and everything else with weights is a branch; the norm beside the list ends the stream. An encoder and a
decoder have a stream each. Where a user's module holds an item and adds something of its own, the layer inside is the
layer, and the rest stands around it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from hfpatch.model.code import is_self, tree_of
from hfpatch.model.embed import find_embedding
from hfpatch.model.norms import acts_as_norm
from hfpatch.model.walk import TOOL_PACKAGES, Submodel, Walk, elements, inside, is_stock
from hfpatch.model.wrapping import ON_LAYERS, unwrap, unwrapped

Place = tuple[str, nn.Module]


@dataclass(frozen=True)
class Stack:
    """One residual stream: its decoder layers and their parts, each with its path."""

    path: str
    items: tuple[Place, ...]
    """Of the list: the layers, or what holds a few of them each, as T5's blocks do."""
    layers: tuple[Place, ...]
    layer_norms: tuple[Place, ...]
    branch_out_norms: tuple[Place, ...]
    """Those of the layer norms that a branch's output goes through before it joins the stream."""
    branches: tuple[Place, ...]
    final_norm: Place | None
    wrappers: tuple[tuple[Place, Place], ...] = ()
    """Items that are a user's own module around a layer, each with the layer in it."""

    def around(self) -> Iterator[Place]:
        """Modules with weights of their own that a user's wrappers hold beside the layers."""
        for (path, wrapper), (layer, _) in self.wrappers:
            for name, module in wrapper.named_modules():
                place = f"{path}.{name}"
                if name and not inside(place, layer) and next(module.parameters(recurse=False), None) is not None:
                    yield place, module


def stacks(walk: Walk, submodel: Submodel) -> tuple[Stack, ...]:
    """The stacks of a submodel's own, a decoder's last; none where it has none of this shape."""
    return tuple(_stack(walk, *found) for found in _layer_lists(walk, submodel))


def stock_path(path: str, homes: Mapping[str, str]) -> str:
    """A path as it is without the users' modules around layers.

    Args:
        path: A path from the root.
        homes: Paths of the layers that users' modules hold, each with its path in the stock model.
    """
    outer = path if homes else ""
    while outer and outer not in homes:
        outer = outer.rpartition(".")[0]
    return f"{homes[outer]}{path[len(outer) :]}" if outer else path


def _stack(walk: Walk, list_path: str, items: list[Place]) -> Stack:
    layers = [block for item in items for block in _blocks(*item)]
    norms: list[Place] = []
    after: list[Place] = []
    branches: list[Place] = []
    for path, layer in (unwrapped(*place, ON_LAYERS) for place in layers):
        out = out_norms(type(layer))
        for name, child in layer.named_children():
            place = (f"{path}.{name}", child)
            if acts_as_norm(child):
                norms.append(place)
                if out is None or name in out:
                    after.append(place)
            elif next(child.parameters(), None) is not None:
                branches.append(place)
    parent = list_path.rpartition(".")[0]
    beside = [
        (f"{parent}.{name}" if parent else name, child)
        for name, child in walk.modules[parent].named_children()
        if acts_as_norm(child)
    ]
    final = beside[-1] if beside else None
    found = ((unwrapped(*item, ON_LAYERS), looked_through(*item) or item) for item in items)
    wrappers = tuple((item, layer) for item, layer in found if layer[1] is not item[1] and inside(layer[0], item[0]))
    return Stack(list_path, tuple(items), tuple(layers), tuple(norms), tuple(after), tuple(branches), final, wrappers)


@cache
def out_norms(layer: type[nn.Module]) -> frozenset[str] | None:
    """Names of the children that a layer's forward calls on the output of another child, with no sum between.

    Told from the source, in its order: `y = self.mlp(x)` then `self.post_norm(y)` makes `post_norm` one; after
    `y = residual + y` it reads the stream, and so it does if the child was given the residual to add. None where the
    source cannot be read.
    """
    tree = tree_of(layer.forward)
    if tree is None:
        return None
    found: set[str] = set()
    _follow(getattr(tree, "body", []), set(), found)
    return frozenset(found)


def _follow(statements: Iterable[ast.stmt], outputs: set[str], found: set[str]) -> set[str]:
    """Note the norms called on what a branch put out; returns the names that hold such values afterwards."""
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
    """Whether a value is what a branch put out: called here or named before, passed on by whatever adds nothing."""
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
"""Config keys of a depth, where encoder and decoder have one each."""


def _layer_lists(walk: Walk, submodel: Submodel) -> list[tuple[str, list[Place]]]:
    """The lists of blocks as long as the config says that are nearest the submodel's root and in no other submodel.

    One list, but where the config has a depth for an encoder and a decoder.
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
        if len(items) < min(depths, default=0):
            continue
        if all(_blocks(*item) for item in items):
            found.append((path, items))
    nearest = min((path.count(".") for path, _ in found), default=0)
    found = [each for each in found if each[0].count(".") == nearest]
    return found if len(depths) > 1 else found[:1]


def unread(walk: Walk, submodel: Submodel) -> str:
    """Why the list of a submodel's layers cannot be read: the item that hides one; empty where no list has any."""
    for path, module in walk.own(submodel):
        if not isinstance(module, nn.ModuleList) or any(n.isdigit() for n in path[len(submodel.path) :].split(".")):
            continue
        items = [(f"{path}.{name}", item) for name, item in module.named_children()]
        read = [bool(_blocks(*item)) for item in items]
        for (place, item), found in zip(items, read, strict=True):
            held = len({id(layer) for _, layer in _layers_inside(place, item)})
            if not found and (held or any(read)):
                several = f"holds {held} decoder layers, and which of them it runs cannot be told"
                return f"{place} is a {type(item).__name__}, which {several if held else 'holds no decoder layer'}"
    return ""


def looked_through(path: str, item: nn.Module) -> Place | None:
    """The layer that an item of a list is, or that a user's module around it holds; None where that holds several."""
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
    """The outermost layers of transformers' own code in a module; an attention with norms of its own is no layer."""
    path, module = unwrapped(path, module, ON_LAYERS)
    for name, child in module.named_children():
        place = (f"{path}.{name}", child)
        inner = unwrap(child, ON_LAYERS)
        if _forward_is_stock(inner) and _parts(*place) and not _is_attention(inner):
            yield place
        else:
            yield from _layers_inside(*place)


def _forward_is_stock(module: nn.Module) -> bool:
    """True if a module's class has a forward that transformers wrote, overridden or not."""
    return any(is_stock(cls) and "forward" in cls.__dict__ for cls in type(module).__mro__)


def own_class(module: nn.Module) -> type:
    """A module's class; of one that FSDP2 made, the class it was made of."""
    return next(c for c in type(module).__mro__ if not c.__module__.startswith("torch.distributed.fsdp"))


def _is_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower() and not type(module).__name__.endswith(("Layer", "Block"))


def _blocks(path: str, item: nn.Module) -> list[Place]:
    """An item of a list if it is a block, or holds one; else its parts, if they are blocks, as T5's are; else none."""
    layer = looked_through(path, item)
    return [] if layer is None else _parts(*layer)


def _parts(path: str, item: nn.Module) -> list[Place]:
    if is_block(item):
        return [(path, item)]
    path, item = unwrapped(path, item, ON_LAYERS)
    parts = [(f"{path}.{name}", part) for name, part in item.named_children()]
    if len(parts) == 1 and isinstance(parts[0][1], nn.ModuleList):
        parts = [(f"{parts[0][0]}.{name}", part) for name, part in parts[0][1].named_children()]
    return parts if all(is_block(part) for _, part in parts) else []


def is_block(module: nn.Module) -> bool:
    """Whether a module has a norm and a branch among its children, as the layers of a stack do."""
    children = list(unwrap(module, ON_LAYERS).children())
    return any(acts_as_norm(c) for c in children) and any(
        not acts_as_norm(c) and any(True for _ in c.parameters()) for c in children
    )


def stream_dtype(walk: Walk, submodel: Submodel, found: Stack) -> torch.dtype | None:
    """Dtype of the residual stream: what embeddings and branch outputs promote to. None if it has no weights.

    Mixed weights escape an overflow by this promotion: bf16 embeddings and fp16 branches give an fp32 stream.
    """
    dtypes: list[torch.dtype] = []
    embedding = find_embedding(submodel.model)
    weight = getattr(embedding, "weight", None)
    if isinstance(weight, torch.Tensor):
        dtypes.append(weight.dtype)
    first = f"{found.layers[0][0]}."
    for path, branch in found.branches:
        if path.startswith(first) and (dtype := weights_dtype(branch)) is not None:
            dtypes.append(dtype)
    floating = [d for d in dtypes if d.is_floating_point]
    if not floating:
        return None
    out = floating[0]
    for dtype in floating[1:]:
        out = torch.promote_types(out, dtype)
    return out


def weights_dtype(module: nn.Module) -> torch.dtype | None:
    """Dtype in which most of a module's floating-point weights are, adapters left out; None if it has none."""
    counts: dict[torch.dtype, int] = {}
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and "lora_" not in name:
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + elements(parameter)
    return max(counts, key=lambda d: counts[d]) if counts else None
