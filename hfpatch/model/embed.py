"""Finds the token embedding, through every wrapper and for every submodel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfpatch.errors import NoEmbeddingError
from hfpatch.given import TEXT, optional, want
from hfpatch.model.walk import Submodel, Walk, inside


def embed_tokens(model: object, submodel: str | None = None) -> nn.Module:
    """Return the token embedding of a model.

    Calling it gives the embeddings that the model itself computes with it, including LoRA, trainable tokens and a
    scale inside the module (Gemma 3): do not multiply again. Its weight is `.weight`.

    Args:
        model: A module, also inside wrappers (PEFT, DDP, DataParallel, torch.compile), or a Trainer.
        submodel: Path or architecture of the submodel, needed if several have an embedding.

    Returns:
        A module that maps ids `[...]` to embeddings `[..., hidden]`.

    Raises:
        NoEmbeddingError: No submodel has a token embedding, several do and none was named, the name matches none, or
            the model reads several codebooks at once, each with an embedding of its own.
        NotAModelError: `model` holds no torch module.
    """
    want("embed_tokens", submodel=(submodel, optional(TEXT)))
    walk = Walk(model)
    holder, table = resolve(walk, submodel)
    around = [s for s in walk.submodels if s.path != holder.path and inside(holder.path, s.path)]
    calls = any(find_embedding(s.model) is table for s in around)  # Florence-2 calls it and passes embeddings on
    found = table if calls else _of_encoder(holder.model) or table
    if isinstance(found, (nn.ModuleList, nn.ModuleDict)):
        raise NoEmbeddingError(
            f"{holder.place} reads {len(found)} codebooks at once, each with an embedding of its own, and adds these "
            "up: get_input_embeddings() returns the list of them"
        )
    return found


def _of_encoder(model: PreTrainedModel) -> nn.Module | None:
    """Return the token embedding of the encoder of an encoder-decoder; None if the encoder reads no tokens.

    Ids enter there. What the getter of the whole model returns (`shared`) has the same weight and is never called.
    """
    if not getattr(model.config, "is_encoder_decoder", False):
        return None
    getter: Any = type(model).get_encoder
    try:
        encoder = getter(model)
    except (NotImplementedError, AttributeError, TypeError):
        return None
    return find_embedding(encoder) if isinstance(encoder, PreTrainedModel) and encoder is not model else None


def resolve(walk: Walk, wanted: str | None = None) -> tuple[Submodel, nn.Module]:
    """Return the submodel and its token embedding; see `embed_tokens`."""
    candidates = [(s, e) for s in walk.submodels if (e := find_embedding(s.model)) is not None]
    if wanted is not None:
        named = [(s, e) for s, e in candidates if wanted in (s.path, s.architecture)]
        if len(named) == 1:
            return named[0]
        have = ", ".join(f"{s.path or '(root)'} ({s.architecture})" for s, _ in candidates) or "none"
        raise NoEmbeddingError(f"submodel={wanted!r}: want the path or architecture of one of: {have}")
    if not candidates:
        held = ", ".join(s.place for s in walk.submodels) or f"{type(walk.root).__name__}, no transformers model"
        raise NoEmbeddingError(f"no token embedding here: found {held}; only a language model has one")
    distinct = {id(e): (s, e) for s, e in candidates}  # the innermost submodel of each embedding
    for outer in walk.submodels if len(distinct) > 1 else ():  # a model that holds all of them says which is its own
        if all(inside(s.path, outer.path) for s, _ in candidates):
            own = distinct.get(id(find_embedding(outer.model)))
            if own is not None:
                return own
    if len(distinct) > 1:  # an encoder-decoder beside a language model is a speech encoder
        decoders = {k: v for k, v in distinct.items() if not getattr(v[0].model.config, "is_encoder_decoder", False)}
        distinct = decoders if len(decoders) == 1 else distinct
    if len(distinct) > 1:
        have = ", ".join(f"{s.path or '(root)'} ({s.architecture})" for s, _ in distinct.values())
        raise NoEmbeddingError(f"several token embeddings: {have}; name one with submodel=")
    return next(iter(distinct.values()))


def find_embedding(model: PreTrainedModel) -> nn.Module | None:
    """Return the token embedding of a transformers model; None if it has none (a vision or audio tower)."""
    getter: Any = type(model).get_input_embeddings
    try:
        found = getter(model)
    except (NotImplementedError, AttributeError, TypeError):
        return None
    if not isinstance(found, nn.Module) or not is_token_embedding(found):
        return None
    takes: Any = getattr(model, "input_modalities", "text")
    return found if "text" in takes or isinstance(found, nn.Embedding) else None


def is_token_embedding(module: nn.Module) -> bool:
    """True if a module maps ids to vectors: an `nn.Embedding`, or an adapter around one."""
    if isinstance(module, nn.Embedding):
        return True
    parts = list(module.modules())
    if any(isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for m in parts):
        return False  # image patches with position embeddings
    inner = [m for m in parts if isinstance(m, nn.Embedding)]
    weight = getattr(module, "weight", None)
    return bool(inner) and (weight is None or (isinstance(weight, torch.Tensor) and weight.dim() == 2))


class InputEmbeddings:
    """A `get_input_embeddings` for an object without one: finds the token embedding at each call."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self) -> nn.Module:
        """Return the token embedding."""
        return embed_tokens(self.model)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InputEmbeddings) and other.model is self.model

    __hash__ = object.__hash__
