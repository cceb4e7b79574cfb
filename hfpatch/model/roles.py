"""What the parts of a decoder are for, told from structure and not from names.

The residual stream runs through the items of one `ModuleList`. Of an item's children, the norms work on
the stream and everything else with weights is a branch; the norm beside the list ends the stream.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from hfpatch.model.code import is_self, tree_of
from hfpatch.model.norms import acts_as_norm
from hfpatch.model.survey import Submodel, Survey

Place = tuple[str, nn.Module]


@dataclass(frozen=True)
class Stack:
    """One residual stream: its decoder layers and their parts, each with its path."""

    path: str
    layers: tuple[Place, ...]
    layer_norms: tuple[Place, ...]
    branch_out_norms: tuple[Place, ...]
    """Those of the layer norms that a branch's output goes through before it joins the stream."""
    branches: tuple[Place, ...]
    final_norm: Place | None


def stack(survey: Survey, submodel: Submodel) -> Stack | None:
    """The decoder stack of a submodel's own; None where it has none of this shape."""
    found = _layer_list(survey, submodel)
    if found is None:
        return None
    list_path, layers = found
    norms: list[Place] = []
    after: list[Place] = []
    branches: list[Place] = []
    for path, layer in (peeled(*place) for place in layers):
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
        for name, child in survey.modules[parent].named_children()
        if acts_as_norm(child)
    ]
    final = beside[-1] if beside else None
    return Stack(list_path, tuple(layers), tuple(norms), tuple(after), tuple(branches), final)


@cache
def out_norms(layer: type[nn.Module]) -> frozenset[str] | None:
    """Names of the children that a layer's forward calls on the output of the child called before, with no sum between.

    Told from the source, in its order: `self.mlp(x)` then `self.post_norm(x)` makes `post_norm` one; with
    `x = residual + x` between them it reads the stream. None where the source cannot be read.
    """
    tree = tree_of(layer.forward)
    if tree is None:
        return None
    found: set[str] = set()
    fed_by_child = False
    for node in _in_order(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            fed_by_child = False
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_self(node.func.value):
            if fed_by_child:
                found.add(node.func.attr)
            fed_by_child = "norm" not in node.func.attr
    return frozenset(found)


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes in the order of evaluation: operands and arguments before what uses them."""
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)
    yield node


def _layer_list(survey: Survey, submodel: Submodel) -> tuple[str, list[Place]] | None:
    """The list of `num_hidden_layers` blocks that is nearest the submodel's root and in no other submodel."""
    depth = getattr(submodel.model.config, "num_hidden_layers", None)
    best: tuple[int, str, list[Place]] | None = None
    for path, module in survey.own(submodel):
        if not isinstance(module, nn.ModuleList) or len(module) == 0:
            continue
        if any(name.isdigit() for name in path[len(submodel.path) :].split(".")):  # a list inside a block
            continue
        items = [(f"{path}.{name}", item) for name, item in module.named_children()]
        if isinstance(depth, int) and len(items) < depth:
            continue
        if not all(is_block(item) for _, item in items):
            continue
        level = path.count(".")
        if best is None or level < best[0]:
            best = (level, path, items)
    return None if best is None else (best[1], best[2])


def peeled(path: str, module: nn.Module) -> Place:
    """A module without the wrappers that torch.compile and torch's activation checkpointing put around it."""
    for name in ("_orig_mod", "_checkpoint_wrapped_module"):
        if isinstance(inner := module.__dict__["_modules"].get(name), nn.Module):
            return peeled(f"{path}.{name}", inner)
    return path, module


def is_block(module: nn.Module) -> bool:
    """Whether a module has a norm and a branch among its children, as the layers of a stack do."""
    children = list(peeled("", module)[1].children())
    return any(acts_as_norm(c) for c in children) and any(
        not acts_as_norm(c) and any(True for _ in c.parameters()) for c in children
    )


def stream_dtype(survey: Survey, submodel: Submodel, found: Stack) -> torch.dtype | None:
    """Dtype of the residual stream: what embeddings and branch outputs promote to. None if it has no weights.

    Mixed weights escape an overflow by this promotion: bf16 embeddings and fp16 branches give an fp32 stream.
    """
    from hfpatch.model.embed import find_embedding

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
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda d: counts[d]) if counts else None
