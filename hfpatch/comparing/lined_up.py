"""Two models lined up: their modules by path, without the names that wrappers insert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfpatch.errors import InputError
from hfpatch.given import MAPPING, want
from hfpatch.model.embed import find_embedding
from hfpatch.model.survey import Survey
from hfpatch.model.walk import root_module, without_copy
from hfpatch.model.wrapping import RUN_AGAIN, plain, unwrap, unwrapped
from hfpatch.patching.verifying.answer import Batch, prepared
from hfpatch.tracing.watched import Places, places

NAMED = 3
"""Number of paths that a message names."""

SHARING = "copy.deepcopy(model, {id(p): p for p in model.parameters()})"
"""Makes a copy of a model that shares its weights, so that its modes are its own."""


@dataclass(frozen=True)
class Side:
    """One of the two models.

    Attributes:
        name: `A` or `B`.
        given: The module that the caller passed.
        model: The module that is called: without wrappers that talk to other devices, or that compile.
        root: The module whose parts are lined up: without any wrapper, or a submodel.
        survey: Survey of `root`.
        places: The blocks and containers of `root`.
        batch: The arguments of `model`.
    """

    name: str
    given: nn.Module
    model: nn.Module
    root: nn.Module
    survey: Survey
    places: Places
    batch: Batch

    def blocks(self) -> dict[str, nn.Module]:
        """Return the blocks by their common path."""
        return {common(path): module for path, module in self.places.blocks.items()}

    def containers(self) -> dict[str, nn.Module]:
        """Return the modules that hold blocks, by their common path."""
        return {common(path): module for path, module in self.places.containers.items()}

    def modules(self) -> dict[str, nn.Module]:
        """Return every module by its common path; of a layer of PEFT, the layer of the model in it."""
        return {common(path): module for path, module in self.survey.modules.items()}


@dataclass(frozen=True)
class Pair:
    """Two models that are lined up.

    Attributes:
        a, b: The models.
        blocks: Paths of the blocks that both have.
        only_a, only_b: Paths of the blocks that one of them has.
    """

    a: Side
    b: Side
    blocks: tuple[str, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


def common(path: str) -> str:
    """Return a path without the names that wrappers, adapters and their copies insert."""
    return plain(without_copy(path), "base_layer")


def lined_up(a: object, b: object, batch: Mapping[str, Any]) -> Pair:
    """Return two models lined up by the paths of their blocks, or by those in submodels of one architecture.

    Raises:
        NotAModelError: `a` or `b` holds no torch module.
        InputError: They are one object, they cannot be run on the batch, or they have no block in common.
    """
    want("compare", batch=(batch, MAPPING))
    given = root_module(a), root_module(b)
    if given[0] is given[1]:
        raise InputError(
            "compare: a and b are one object, so nothing can differ; change the mode of a copy that shares the weights "
            f"(b = {SHARING}) and pass that"
        )
    first, second = (_side(name, module, batch, None) for name, module in zip("AB", given, strict=True))
    if not _both(first, second):
        first, second = _submodels(first, second, batch)
    both = _both(first, second)
    if not both:
        raise InputError(
            f"compare: no block of {_title(first)} has the path of one of {_title(second)}: A has "
            f"{_some(first.blocks())}, B has {_some(second.blocks())}; pass two models of one architecture"
        )
    only_a = tuple(p for p in first.blocks() if p not in second.blocks())
    only_b = tuple(p for p in second.blocks() if p not in first.blocks())
    pair = Pair(first, second, tuple(both), only_a, only_b)
    for side in (first, second):
        _check_ids(side, pair)
    return pair


def _both(a: Side, b: Side) -> list[str]:
    """Return the paths of blocks that both have; none if it is one of many, such as a head."""
    found = [p for p in a.blocks() if p in b.blocks()]
    return found if len(found) > 1 or min(len(a.blocks()), len(b.blocks())) < 3 else []


def _side(name: str, given: nn.Module, batch: Mapping[str, Any], inside: nn.Module | None) -> Side:
    model = unwrap(given, RUN_AGAIN)
    root = inside if inside is not None else unwrapped("", given)[1]
    return Side(name, given, model, root, Survey(root), places(root), prepared(given, batch, "compare"))


def _submodels(a: Side, b: Side, batch: Mapping[str, Any]) -> tuple[Side, Side]:
    """Return the sides narrowed to the first submodels of one architecture; as they are if there are none."""
    for mine in a.survey.submodels:
        for other in b.survey.submodels:
            if mine.architecture == other.architecture:
                return _side("A", a.given, batch, mine.model), _side("B", b.given, batch, other.model)
    return a, b


def _check_ids(side: Side, pair: Pair) -> None:
    """Raise if a model has no row for a token: the other one has a larger vocabulary."""
    ids = side.batch.inputs.get("input_ids")
    rows = _rows(side)
    if isinstance(ids, torch.Tensor) and ids.numel() and rows is not None and int(ids.max()) >= rows:
        other = _rows(pair.b if side is pair.a else pair.a)
        theirs = f" (the other model's has {other:,})" if other is not None else ""
        raise InputError(
            f"compare: token {int(ids.max()):,} of the batch has no row in {side.name}, whose embedding has {rows:,} "
            f"rows{theirs}; pass a batch of tokens that both know"
        )


def _rows(side: Side) -> int | None:
    """Return the number of rows of the token embedding of a transformers model; None for other models."""
    embedding = find_embedding(side.root) if isinstance(side.root, PreTrainedModel) else None
    return embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None


def _title(side: Side) -> str:
    return f"{side.name} ({type(side.root).__name__})"


def _some(paths: Mapping[str, object]) -> str:
    found = list(paths)
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return (", ".join(p or "the model itself" for p in found[:NAMED]) + more) if found else "none"
