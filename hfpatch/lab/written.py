"""Embeddings whose output a model writes into in place, by a run of a tiny model like it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfpatch.compat import hooks
from hfpatch.compat.autograd import version
from hfpatch.lab.example import example_inputs
from hfpatch.lab.like import FAILED, Like, apart, input_embeddings, outputs, requiring, short
from hfpatch.model.code import tree_of
from hfpatch.model.embed import find_embedding
from hfpatch.model.put_back import as_before
from hfpatch.model.survey import Survey
from hfpatch.model.walk import TOOL_PACKAGES
from hfpatch.model.wrapping import joined, plain, unwrap


@dataclass(frozen=True)
class Written:
    """What runs of tiny models showed.

    Attributes:
        modules: The embeddings whose output is written into, by path.
        untried: Why a transformers model inside could not be tried, by its path.
    """

    modules: Mapping[str, nn.Module] = field(default_factory=dict[str, nn.Module])
    untried: Mapping[str, str] = field(default_factory=dict[str, str])


def written_embeddings(survey: Survey) -> Written:
    """Return the embeddings of the transformers models inside an object whose output is written into in place.

    The code of a model of the user's own around them is not run.
    """

    def look() -> Written:
        here = {plain(path): path for path in survey.modules}
        modules: dict[str, nn.Module] = {}
        untried: dict[str, str] = {}
        for submodel in survey.outermost_built:
            try:
                with apart():
                    names = _written(Like.of(submodel.model))
            except FAILED as error:
                untried[submodel.path] = short(error)
                continue
            for name in names:
                path = plain(joined(submodel.path, name))
                if path in here:
                    modules[here[path]] = survey.modules[here[path]]
                else:
                    untried[submodel.path] = f"a tiny model of it writes into {name}, which is not here"
        return Written(modules, untried)

    return survey.once("written embeddings", look)


def to_copy(survey: Survey) -> dict[str, nn.Module]:
    """Return the embeddings whose output is to be copied, by path.

    Those that are written into; where that cannot be seen, every token embedding: `writing_classes`, or no trial.
    """
    found = written_embeddings(survey)
    if found.modules or not (found.untried or writing_classes(survey)):
        return dict(found.modules)
    every = (find_embedding(submodel.model) for submodel in survey.submodels)
    return {survey.path(module): module for module in every if module is not None}


def writing_classes(survey: Survey) -> list[str]:
    """Return the names of classes of the user's own around a transformers model whose code writes in place anywhere.

    A class whose code cannot be read counts too.
    """
    found: dict[str, None] = {}
    for module in survey.modules.values():
        cls = type(module)
        holds = any(isinstance(each, PreTrainedModel) for each in module.modules())
        if holds and not cls.__module__.startswith((*TOOL_PACKAGES, "transformers.")):
            tree = tree_of(cls)
            if tree is None or any(map(_writes, ast.walk(tree))):
                found[cls.__name__] = None
    return list(found)


def _writes(node: ast.AST) -> bool:
    """True for `x += y`, `x[i] = y` and `x.add_(y)`."""
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Subscript) for target in node.targets)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr.endswith("_") and not node.func.attr.endswith("__")
    return isinstance(node, ast.AugAssign)


def raises_behind_frozen_embeddings(model: nn.Module) -> str | None:
    """Return what a step of a tiny model raises once its embeddings are frozen and require gradients; None if nothing.

    Args:
        model: A transformers model, or PEFT's around one. It is left as it was.
    """
    inner: Any = unwrap(model)
    trained = [p for each in input_embeddings(inner) for p in each.parameters() if p.requires_grad]
    with apart(), as_before(model), requiring(trained, on=False):
        inner.enable_input_require_grads()
        try:
            torch.autograd.backward([t.float().square().mean() for t in outputs(model, example_inputs(inner))])
        except RuntimeError as error:
            return short(error)
    return None


@lru_cache(maxsize=64)
def _written(like: Like) -> tuple[str, ...]:
    """Return the paths of the embeddings that a tiny model writes into."""
    held: list[tuple[str, torch.Tensor, int]] = []

    def note(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                held.append((path, output, version(output)))

        return hook

    model, batch = like.tiny()
    for path, module in model.named_modules():
        if any(module is each for each in input_embeddings(model)):
            hooks.after(module, note(path))
    with torch.no_grad():
        outputs(model, batch)
    return tuple(dict.fromkeys(path for path, output, before in held if version(output) != before))
