"""Whether a language model keeps packed documents apart, and by which change: runs of a tiny model like it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfpatch.compat import hooks
from hfpatch.compat.implementation import choose
from hfpatch.errors import InputError
from hfpatch.lab.like import FAILED, Like, apart, short
from hfpatch.lab.tiny import TASKS
from hfpatch.model.attention import implementation
from hfpatch.model.survey import Survey
from hfpatch.model.walk import Submodel, stock_class
from hfpatch.model.wrapping import joined, plain
from hfpatch.numerics.documents import kept_apart

RUNS_HERE = ("eager", "sdpa", "hfpatch_")
"""Beginnings of the names of implementations that run on a CPU."""
LENGTHS = (23, 19, 22)
"""Tokens of the documents: more than a tiny model's window, so that a mask which loses the window shows."""
STAYS = (
    "without a cache and with masks for each document, logits stay {:.2g} of their size away from those of each "
    "document alone (in a tiny model of it): layers with a state (Mamba, RWKV, convolutions), attention both ways, or "
    "positions that the model counts itself"
)
SAME = 1e-4
"""The largest difference of logits, over their size, that rounding makes in float32."""


@dataclass(frozen=True)
class Packed:
    """What runs of a tiny model showed.

    Attributes:
        model: Path of the model inside that is called with the positions. It is not the outermost one: PEFT calls
            the forward of that, past its hooks.
        leaks: By how much the logits of packed documents are away from those of each alone, over their size.
        masked: By what they are kept apart: True by a mask, False without a cache; None if by neither, or untried.
        why_not: Why not; empty if they are kept apart, with a change or without.
    """

    model: str = ""
    leaks: float = 0.0
    masked: bool | None = None
    why_not: str = ""


def packed(survey: Survey, submodel: Submodel) -> Packed | None:
    """Return whether a language model keeps packed documents apart; None for what is no causal language model."""

    def look() -> Packed | None:
        name = implementation(submodel)
        if not _is_causal(submodel.model):
            return None
        if not name.startswith(RUNS_HERE):
            return Packed(
                why_not=f"its attention is {name}, which cannot be tried on a CPU; flash_attention_2 reads the "
                "documents from position_ids itself, in one row and without an attention_mask"
            )
        try:
            with apart():
                found = _packed(Like.of(submodel.model), name)
            here = {plain(path): path for path in survey.modules}
            inner = plain(joined(submodel.path, found.model))
            return replace(found, model=here[inner])
        except FAILED as error:
            return Packed(why_not=f"it could not be tried: {short(error)}")

    return survey.once(("packed", submodel.path), look)


def _is_causal(model: PreTrainedModel) -> bool:
    """True for a causal language model with its head, by its class."""
    cls = stock_class(model)
    return cls is not None and cls.__name__ in TASKS["causal"].values()


@lru_cache(maxsize=64)
def _packed(like: Like, attention: str) -> Packed:
    model, _ = like.tiny()
    choose(model.config, attention)
    model.eval()
    if model.get_output_embeddings() is None:
        raise InputError(f"{like.cls.__name__} has no head, so it gives no logits to compare")
    draw = torch.Generator().manual_seed(0)
    documents = [torch.randint(5, 60, (1, n), generator=draw) for n in LENGTHS]
    given = {
        "input_ids": torch.cat(documents, 1),
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
    }
    with torch.no_grad():
        alone = torch.cat([model(input_ids=ids, use_cache=False).logits for ids in documents], 1)
        if (inner := _called(model, given)) is None:
            return Packed(why_not="it takes no position_ids, by which documents are told")
        leaks = _away(model, given, alone, {})
        if leaks <= SAME:
            return Packed(inner)
        part = model.get_submodule(inner)
        away = {masked: _away(model, given, alone, {part: masked}) for masked in (False, True)}
    masked = next((each for each, rest in away.items() if rest <= SAME), None)
    why = "" if masked is not None else STAYS.format(min(away.values()))
    return Packed(inner, leaks, masked, why)


def _called(model: PreTrainedModel, given: dict[str, Any]) -> str | None:
    """Return the path of the first model inside a model that is called with positions; None if none is."""
    found: list[str] = []

    def note(path: str) -> Any:
        def hook(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
            if kwargs.get("position_ids") is not None:
                found.append(path)

        return hook

    inside = [(path, m) for path, m in model.named_modules() if path and isinstance(m, PreTrainedModel)]
    handles = [hooks.before(module, note(path), with_kwargs=True) for path, module in inside]
    try:
        model(**given)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


@contextlib.contextmanager
def keeping_documents(models: Mapping[nn.Module, bool]) -> Generator[None]:
    """Have models keep packed documents apart for a while: by a mask where the value is True, else without a cache."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        now = kept_apart(module, kwargs, masked=models[module])
        return None if now is None else (args, now)

    handles = [hooks.before(module, hook, with_kwargs=True) for module in models]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _away(
    model: PreTrainedModel, given: dict[str, Any], alone: torch.Tensor, patched: Mapping[nn.Module, bool]
) -> float:
    """Return how far the logits of packed documents are from those of each alone; infinity if the model raises."""
    try:
        with keeping_documents(patched):
            logits = model(**given, use_cache=True).logits
    except FAILED:
        return float("inf")
    return float((logits - alone).abs().max() / alone.abs().max())


def moved(model: nn.Module) -> float:
    """Return by how much the logits of a tiny model's second document move if the first is another.

    Args:
        model: A causal language model, or PEFT's around one, which is called as training calls it.
    """
    first, second = LENGTHS[:2]
    draw = torch.Generator().manual_seed(0)
    rest = torch.randint(5, 60, (1, second), generator=draw, device="cpu")
    positions = torch.cat([torch.arange(n, device="cpu") for n in (first, second)])[None]
    found: list[torch.Tensor] = []
    with torch.no_grad():
        for _ in range(2):
            ids = torch.cat([torch.randint(5, 60, (1, first), generator=draw, device="cpu"), rest], 1)
            found.append(model(input_ids=ids, position_ids=positions).logits[:, first:].float())
    return float((found[0] - found[1]).abs().max() / found[0].abs().max())
