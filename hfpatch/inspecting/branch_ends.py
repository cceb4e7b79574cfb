"""The last linear map of each attention in a stack: what it writes is added to the stream."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache

from torch import nn

from hfpatch.inspecting.feed_forward import feed_forwards
from hfpatch.lora.linear import features, reads_weight
from hfpatch.model.code import tree_of
from hfpatch.model.reads import calls_as_they_end
from hfpatch.model.roles import Place, Stack, own_class
from hfpatch.model.walk import outers
from hfpatch.model.wrapping import ON_LAYERS, unwrap


def branch_maps(stack: Stack) -> Iterator[tuple[Place, ...]]:
    """Yield the linear maps of each branch that has no feed-forward part, without adapters.

    Those are attentions and mixers, and MLPs without a module for their activation. The order is that in which the
    forward's calls end, else that of the module. Branches that read the stream itself are left out.
    """
    parts = list(feed_forwards(stack))
    theirs = [part.path for part in parts if not part.of_layer] + [p for part in parts for p in part.places]
    raw = {path for path, _ in stack.raw_readers}
    holders = {outer for p in (*theirs, *raw) for outer in outers(p)}
    for path, branch in stack.branches:
        if path in holders or not raw.isdisjoint(outers(path)):
            continue
        if any(isinstance(module, nn.ModuleList) for module in branch.modules()):  # layers of its own
            continue
        if found := tuple(_maps(path, branch)):
            yield found


def _maps(path: str, module: nn.Module) -> Iterator[Place]:
    if features(module) is not None:
        yield path, module
        return
    called = {name: at for at, name in enumerate(calls_as_they_end(type(module)))}
    ordered: list[tuple[int, str, nn.Module]] = []
    for name, child in module.named_children():
        before = ordered[-1][0] if ordered else -1  # one that another method calls stays behind its neighbour
        ordered.append((called.get(name, before), name, child))
    for _, name, child in sorted(ordered, key=lambda each: each[0]):
        if "lora_" not in name:
            yield from _maps(f"{path}.{name}", child)


def branch_ends(stack: Stack, modules: Mapping[str, nn.Module]) -> Iterator[Place]:
    """Yield the last map of each such branch, `o_proj`, if it writes as many features as another one reads.

    Left out are those whose output cannot be float32: the module around them uses their weight, so that their hooks
    would not run (torch's MultiheadAttention), or the layer adds what they write to another tensor in place (Falcon).

    Args:
        stack: The stack.
        modules: The modules of the object, by path.
    """
    layers = {path: own_class(unwrap(layer, ON_LAYERS)) for path, layer in stack.layers}
    for maps in branch_maps(stack):
        *before, (path, last) = maps
        (_, width) = features(last) or (0, 0)
        reads = any((features(module) or (0, 0))[0] == width for _, module in before)
        in_place = any(adds_in_place(layers[outer]) for outer in outers(path) if outer in layers)
        if reads and not in_place and not _used_directly(path, modules):
            yield path, last


@cache
def adds_in_place(cls: type[nn.Module]) -> bool:
    """True if a layer's forward adds a value other than the residual to another in place: `mlp += attention`."""
    tree = tree_of(cls.forward)
    added = (node for node in ast.walk(tree) if isinstance(node, ast.AugAssign)) if tree is not None else ()
    return any(
        isinstance(node.op, ast.Add) and isinstance(node.value, ast.Name) and node.value.id != "residual"
        for node in added
    )


def _used_directly(path: str, modules: Mapping[str, nn.Module]) -> bool:
    while path.endswith(".base_layer"):
        path = path.removesuffix(".base_layer")
    parent, _, name = path.rpartition(".")
    holder = modules[parent]
    return isinstance(holder, nn.MultiheadAttention) or reads_weight(type(holder), name)
