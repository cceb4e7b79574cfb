"""Stacks of layers that reentrant checkpointing cuts off from the backward pass, by runs of a tiny model like it.

A reentrant checkpoint passes gradients on only if a tensor that it was called with requires one. Where everything
before a tower's layers is frozen, none does, and what trains in the layers gets no gradient, silently.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hfpatch.compat import checkpointing, hooks
from hfpatch.lab.example import example_inputs
from hfpatch.lab.like import FAILED, Like, apart, input_embeddings, outputs, requiring, short
from hfpatch.model.code import is_self, tree_of
from hfpatch.model.embed import find_embedding
from hfpatch.model.put_back import as_before
from hfpatch.model.survey import Survey
from hfpatch.model.walk import inside
from hfpatch.model.wrapping import joined, plain, unwrap
from hfpatch.numerics.outputs import copied, leaves, tensor_of, with_tensor


@dataclass(frozen=True)
class Start:
    """A list of layers that is cut off.

    Attributes:
        layers: Path of the list.
        feeders: Paths of the modules whose outputs are what comes into its first layer, the last called first.
        before: Paths of the modules with parameters that what comes into its first layer depends on.
        why_not: Why gradients from a feeder on would not mend it; empty if they would.
    """

    layers: str
    feeders: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    why_not: str = ""


@dataclass(frozen=True)
class CutOff:
    """What runs of tiny models showed.

    Attributes:
        starts: The lists of layers that are cut off.
        untried: Why a transformers model inside could not be tried, by its path.
    """

    starts: tuple[Start, ...] = ()
    untried: Mapping[str, str] = field(default_factory=dict[str, str])


def cut_off(survey: Survey) -> CutOff:
    """Return the lists of layers in an object that reentrant checkpointing cuts off, with paths in the object."""

    def look() -> CutOff:
        here = {plain(path): path for path in survey.modules}
        starts: list[Start] = []
        untried: dict[str, str] = {}
        for submodel in survey.outermost_built:
            if _begins_at_embeddings(submodel.model):
                continue
            try:
                with apart():
                    found = _cut_off(Like.of(submodel.model))
            except FAILED as error:
                untried[submodel.path] = short(error)
                continue
            for start in found:
                layers, feeders, before = (
                    [here[path] for name in names if (path := plain(joined(submodel.path, name))) in here]
                    for names in ((start.layers,), start.feeders, start.before)
                )
                starts += [Start(path, tuple(feeders), tuple(before), start.why_not) for path in layers]
        return CutOff(tuple(starts), untried)

    return survey.once("cut off", look)


def trained_behind(survey: Survey) -> dict[Start, int]:
    """Return the lists that are cut off and in which parameters train, with the number of these.

    Left out are those into which something comes that trains: its gradient passes through them.
    """

    def count(*paths: str) -> int:
        return sum(p.requires_grad for p in {p for path in paths for p in survey.modules[path].parameters()})

    found = {start: count(start.layers) for start in cut_off(survey).starts if not count(*start.before)}
    return {start: trained for start, trained in found.items() if trained}


def _lists(model: nn.Module) -> dict[str, list[GradientCheckpointingLayer]]:
    """Return the lists of layers that can be checkpointed, by path."""
    found: dict[str, list[GradientCheckpointingLayer]] = {}
    for path, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            found.setdefault(path.rpartition(".")[0], []).append(module)
    return found


def _begins_at_embeddings(model: PreTrainedModel) -> bool:
    """True if a model's only list of layers is that of a language model, which begins at its token embeddings.

    Its layers have to take their input by position, as a tensor: a reentrant checkpoint passes no gradient to others.
    """
    embedding = find_embedding(model)
    called = embedding is not None and not isinstance(embedding, nn.ModuleList)  # the codebooks of MusicGen
    lists = _lists(model)
    by_position = all(_by_position(model, path, layers[0]) for path, layers in lists.items())
    return called and _reads_text(model) and len(lists) <= 1 and by_position


def _by_position(model: nn.Module, path: str, layer: nn.Module) -> bool:
    """True if a list's layers take and return the stream as those of transformers do, by position; others are tried."""
    first = next(iter(signature(layer.forward).parameters.values()), None)
    takes = first is not None and first.name == "hidden_states" and first.kind is first.POSITIONAL_OR_KEYWORD
    holder, _, name = path.rpartition(".")
    return takes and returns_tensors(type(layer)) and gives_by_position(type(model.get_submodule(holder)), name)


@cache
def returns_tensors(layer: type[nn.Module]) -> bool:
    """True if a forward is seen to return no object of a class, through which checkpointing passes no gradient."""
    tree = tree_of(layer.forward)
    ends = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)] if tree is not None else []
    made = (ast.unparse(end.func).rpartition(".")[2] for end in ends if isinstance(end, ast.Call))
    return bool(ends) and not any(name[:1].isupper() for name in made)


@cache
def gives_by_position(holder: type[nn.Module], name: str) -> bool:
    """True if a forward is seen to call the items of a list of modules, each time with an argument by position."""
    tree = tree_of(holder.forward)
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)] if tree is not None else []
    calls = [
        node
        for loop in loops
        if any(isinstance(n, ast.Attribute) and is_self(n.value) and n.attr == name for n in ast.walk(loop.iter))
        for node in ast.walk(loop)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and any(isinstance(n, ast.Name) and n.id == node.func.id for n in ast.walk(loop.target))
    ]
    return bool(calls) and all(call.args for call in calls)


def _reads_text(model: PreTrainedModel) -> bool:
    """True if transformers makes the input embeddings require gradients when it turns checkpointing on."""
    return model.main_input_name == "input_ids"


@lru_cache(maxsize=64)
def _cut_off(like: Like) -> tuple[Start, ...]:
    """Return the lists of layers of a tiny model that are cut off."""
    model, batch = like.tiny()
    lists = _lists(model)
    if not lists or not model.supports_gradient_checkpointing:
        return ()
    model.requires_grad_(requires_grad=False)
    for layer in (layer for layers in lists.values() for layer in layers):
        layer.requires_grad_(requires_grad=True)
    for embedding in input_embeddings(model) if _reads_text(model) else ():
        hooks.after(embedding, _copy)
    whole = _reached(model, batch)
    _checkpoint(model)
    lost = _owners(whole - _reached(model, batch), lists)
    if not lost:
        return ()
    checkpointing.turn_off(model)
    firsts = {path: lists[path][0] for path in lost}
    feeders, before = _feeders(model, batch, firsts), _before(model, batch, firsts)
    _checkpoint(model)
    for names in feeders.values():
        for name in names[:1]:
            hooks.after(model.get_submodule(name), _copy)
    try:
        still, why = _owners(whole - _reached(model, batch), lists), ""
    except FAILED as error:
        still, why = lost, f"a backward pass then raises {short(error)}"
    return tuple(
        Start(path, feeders[path], before[path], _why_not(why, feeders[path]) if path in still else "") for path in lost
    )


def _checkpoint(model: PreTrainedModel) -> None:
    """Turn reentrant checkpointing on; what transformers sets on the input embeddings with it is set here as a copy."""
    model.config.use_cache = False  # transformers would log that it does that
    checkpointing.turn_on(model, reentrant=True)
    model.disable_input_require_grads()


def _why_not(raised: str, feeders: tuple[str, ...]) -> str:
    if raised or not feeders:
        return raised or "no output of a module before them leads into the first of them"
    return "a reentrant checkpoint passes on gradients of positional arguments alone, and they get keywords"


def _copy(_module: nn.Module, _args: Any, output: Any) -> Any:
    return copied(output)


def _reached(model: nn.Module, batch: dict[str, Any]) -> frozenset[str]:
    """Return the names of the parameters that get a gradient."""
    model.zero_grad(set_to_none=True)
    ends = [tensor.float().square().mean() for tensor in outputs(model, batch) if tensor.requires_grad]
    if ends:
        torch.autograd.backward(ends)
    return frozenset(name for name, p in model.named_parameters() if p.grad is not None)


def _owners(names: frozenset[str], lists: Mapping[str, Any]) -> list[str]:
    """Return the lists in which these parameters are."""
    return [path for path in lists if any(inside(name, path) for name in names)]


def _feeders(model: nn.Module, batch: dict[str, Any], firsts: Mapping[str, nn.Module]) -> dict[str, tuple[str, ...]]:
    """Return the modules whose outputs are what comes into the first layer of each list, the last called first.

    The output of each module outside the layers begins a graph of its own, so none is found behind a later one.
    """
    begun: list[tuple[torch.Tensor, str]] = []
    handles = [hooks.after(module, _begin(path, begun)) for path, module in _outside(model).items()]
    try:
        come = _come_into(model, batch, firsts)
    finally:
        for handle in handles:
            handle.remove()
    return {p: tuple(dict.fromkeys(n for leaf, n in reversed(begun) if id(leaf) in ids)) for p, ids in come.items()}


def _before(model: nn.Module, batch: dict[str, Any], firsts: Mapping[str, nn.Module]) -> dict[str, tuple[str, ...]]:
    """Return the modules outside the layers on whose parameters it depends what comes into each first layer."""
    held = {id(p): path for path, module in _outside(model).items() for p in module.parameters(recurse=False)}
    with requiring((p for p in model.parameters() if id(p) in held), on=True):
        come = _come_into(model, batch, firsts)
    return {p: tuple(dict.fromkeys(held[each] for each in ids if each in held)) for p, ids in come.items()}


def _outside(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that neither are, hold nor lie in a layer, by path."""
    lists = _lists(model)
    return {
        path: module
        for path, module in model.named_modules()
        if not any(isinstance(each, GradientCheckpointingLayer) for each in module.modules())
        and not any(inside(path, each) for each in lists)
    }


def _begin(path: str, begun: list[tuple[torch.Tensor, str]]) -> Callable[..., Any]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        if (tensor := tensor_of(output)) is None:
            return None
        begun.append((tensor.detach().requires_grad_(), path))
        return with_tensor(output, begun[-1][0].clone())

    return hook


def _come_into(model: nn.Module, batch: dict[str, Any], firsts: Mapping[str, nn.Module]) -> dict[str, set[int]]:
    """Return the ids of the leaves of autograd's graph from which comes what the first layers are called with."""
    found: dict[str, set[int]] = {path: set() for path in firsts}

    def look(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            stream = args[0] if args else kwargs.get("hidden_states")
            if isinstance(stream, torch.Tensor):
                found[path].update(map(id, leaves(stream)))

        return hook

    handles = [hooks.before(first, look(path), with_kwargs=True) for path, first in firsts.items()]
    try:
        outputs(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def lost_to_checkpointing(model: nn.Module) -> list[str]:
    """Return the parameters of a tiny model that get no gradient under reentrant checkpointing, and one without.

    Args:
        model: A transformers model, or PEFT's around one. It is left as it was.
    """
    inner: Any = unwrap(model)
    batch = example_inputs(inner)
    with apart(), as_before(model):
        whole = _reached(model, batch)
        checkpointing.turn_on(inner, reentrant=True)
        return sorted(whole - _reached(model, batch))
