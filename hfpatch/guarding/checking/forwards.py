"""How a model's forward works with a Trainer: the loss with `num_items_in_batch`, and activation checkpointing."""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hfpatch.compat import checkpointing, hooks
from hfpatch.guarding.checking.forward_pass import forward_pass
from hfpatch.guarding.checks import clean_name
from hfpatch.model.code import tree_of
from hfpatch.model.put_back import device_of

if TYPE_CHECKING:
    from torch import nn

    from hfpatch.guarding.checking.settings import Settings

ITEMS = "num_items_in_batch"
_LOSS = re.compile(r"loss|cross_entropy|nll|criterion|ctc", re.IGNORECASE)


@dataclass(frozen=True)
class UndividedLoss:
    """A forward that takes `num_items_in_batch` and does not divide its loss by it.

    Attributes:
        reason: How it was found.
        measured: True if the loss was computed; False if the code was read.
    """

    reason: str
    measured: bool


def undivided_loss(model: nn.Module, batch: Mapping[str, Any] | None) -> UndividedLoss | None:
    """Return the forward to which a Trainer would pass `num_items_in_batch` and whose loss does not depend on it.

    Args:
        model: The model inside all wrappers.
        batch: A batch with `labels`, on which the loss is computed twice; if None, or if the model is on meta or does
            not run in evaluation mode, the code of forward is read.

    Returns:
        The forward; None if its loss depends on it, or if that cannot be told.
    """
    if not getattr(model, "accepts_loss_kwargs", True) or _catch_all(type(model)) is None:
        return None
    if batch is None or device_of(model).type == "meta":
        return _read(model)
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor):
        return None  # a Trainer counts labels only
    count = int((labels != -100).sum())
    counts = [torch.tensor(n, device="cpu") for n in (count, 2 * count)]
    losses = [forward_pass(model, {**batch, ITEMS: n}).loss for n in counts] if count else [0.0]
    first = losses[0]
    if first is None:
        return _read(model)
    if not first or not math.isfinite(first) or first != losses[1]:  # a loss of 0 does not tell
        return None
    return UndividedLoss(f"its loss on this batch is {first:.4g} for {count} tokens as for {2 * count}", measured=True)


def _catch_all(cls: type[nn.Module]) -> str | None:
    """Return the name of the `**kwargs` of a class's forward; None without."""
    parameters = inspect.signature(cls.forward).parameters.values()
    return next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD), None)


def _read(model: nn.Module) -> UndividedLoss | None:
    """Read the code of forward; return None if it divides the loss, or if that cannot be told."""
    cls = type(model)
    catch_all = _catch_all(cls)
    tree = tree_of(cls.forward)
    if tree is None:
        return None
    words = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    words |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    if catch_all is None or ITEMS in words | texts or "labels" not in words | texts | set(_parameters(cls)):
        return None
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    handed = [c for c in calls if any(k.arg is None and _names(k.value, catch_all) for k in c.keywords)]
    if catch_all not in words:
        return UndividedLoss(f"{cls.__name__}.forward never looks at its **{catch_all}", measured=False)
    if not handed or any(_LOSS.search(_callee(c)) for c in handed):
        return None
    if any(_LOSS.search(_callee(c)) for c in calls):
        text = f"{cls.__name__}.forward computes its loss without its **{catch_all}"
        return UndividedLoss(text, measured=False)
    inner = [_attribute(model, c.func) for c in handed]
    if any(m is None or _catch_all(type(m)) is None for m in inner):
        return None
    found = [_read(m) for m in inner if m is not None]
    return found[0] if all(f is not None for f in found) else None


def _parameters(cls: type[nn.Module]) -> Iterator[str]:
    yield from inspect.signature(cls.forward).parameters


def _names(node: ast.AST, name: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node))


def _callee(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _attribute(model: nn.Module, node: ast.AST) -> nn.Module | None:
    """Return the module that an expression such as `self.a.b` names; None for any other."""
    if isinstance(node, ast.Name):
        return model if node.id == "self" else None
    if not isinstance(node, ast.Attribute) or (owner := _attribute(model, node.value)) is None:
        return None
    found = getattr(owner, node.attr, None)
    return found if isinstance(found, torch.nn.Module) else None


@dataclass(frozen=True)
class Cut:
    """Layers under reentrant checkpointing whose inputs require no gradient, so backward does not reach them.

    Attributes:
        first: Path of the first of these layers.
        tensors: Number of their parameters that require a gradient.
        measured: True if the model was run on a batch.
    """

    first: str
    tensors: int


def cut_stacks(model: nn.Module, inner: nn.Module, settings: Settings | None) -> list[Cut]:
    """Return the stacks of layers that reentrant checkpointing would cut off from the backward pass.

    That is told from the parameters that train before the layers; nothing is run.

    Args:
        model: The model as it is trained.
        inner: The model inside all wrappers.
        settings: The training arguments; None if none were passed.
    """
    layers = [(clean_name(n), m) for n, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)]
    stacks: dict[str, list[tuple[str, GradientCheckpointingLayer]]] = {}
    for name, layer in layers:
        if is_reentrant(layer, settings):
            stacks.setdefault(name.rpartition(".")[0], []).append((name, layer))
    training = {s: n for s, held in stacks.items() if (n := _trainable(held))}
    if not training:
        return []
    turned_on = any(layer.gradient_checkpointing for _, layer in layers)
    main: Any = getattr(inner, "main_input_name", None)
    # with text as input, transformers makes the embeddings require gradients when it turns checkpointing on
    if (not turned_on and main == "input_ids") or _trains_before(model, inner, layers):
        return []
    return [Cut(stacks[s][0][0], count) for s, count in training.items()]


def is_reentrant(layer: GradientCheckpointingLayer, settings: Settings | None) -> bool:
    """True if a layer is checkpointed by torch's reentrant implementation, or will be with these settings."""
    if layer.gradient_checkpointing:
        return checkpointing.is_reentrant(layer)
    return settings is not None and settings.checkpointing and settings.reentrant


def _trainable(layers: list[tuple[str, GradientCheckpointingLayer]]) -> int:
    return sum(p.requires_grad for _, layer in layers for p in layer.parameters())


def _trains_before(model: nn.Module, inner: nn.Module, layers: list[tuple[str, GradientCheckpointingLayer]]) -> bool:
    """True if a parameter outside of the layers and the head trains, or a hook makes the inputs require gradients."""
    if any(
        "require_grad" in getattr(h, "__name__", "") for m in model.modules() for h in hooks.hooks_of(m)[1].values()
    ):
        return True
    after = {id(p) for _, layer in layers for p in layer.parameters()}
    if isinstance(inner, PreTrainedModel):
        base: Any = inner.base_model
        after |= {id(p) for p in inner.parameters()} - {id(p) for p in base.parameters()}
    return any(p.requires_grad and id(p) not in after for p in model.parameters())
