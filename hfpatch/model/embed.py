"""One resolver for the token embedding, through every wrapper and for every submodel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfpatch.errors import NoEmbeddingError
from hfpatch.given import TEXT, optional, want
from hfpatch.model.walk import Submodel, Walk


def embed_tokens(model: object, submodel: str | None = None) -> nn.Module:
    """The module to call with token ids.

    Calling it gives what the model itself uses: LoRA, trainable tokens and a scale inside the module
    (Gemma 3) included, so nothing is to be multiplied by hand. For the weight, read `.weight` of it.

    Args:
        model: A module, however wrapped (PEFT, DDP, DataParallel, compile), or a Trainer.
        submodel: Path or architecture of the submodel meant, where there are several.

    Returns:
        A module that maps ids `[...]` to embeddings `[..., hidden]`.

    Raises:
        NoEmbeddingError: No submodel has a token embedding, or several do and none was named.
    """
    want("embed_tokens", submodel=(submodel, optional(TEXT)))
    return resolve(Walk(model), submodel)[1]


def resolve(walk: Walk, wanted: str | None = None) -> tuple[Submodel, nn.Module]:
    """The submodel and its token embedding; see `embed_tokens`."""
    candidates = [(s, e) for s in walk.submodels if (e := find_embedding(s.model)) is not None]
    if wanted is not None:
        named = [(s, e) for s, e in candidates if wanted in (s.path, s.architecture)]
        if len(named) == 1:
            return named[0]
        have = ", ".join(f"{s.path or '(root)'} ({s.architecture})" for s, _ in candidates) or "none"
        raise NoEmbeddingError(f"submodel {wanted!r}: want the path or architecture of one of: {have}")
    if not candidates:
        held = ", ".join(s.place for s in walk.submodels) or f"{type(walk.root).__name__}, no transformers model"
        raise NoEmbeddingError(f"no token embedding here: found {held}; only a language model has one")
    distinct = {id(e): (s, e) for s, e in candidates}  # the innermost submodel of each embedding
    if len(distinct) > 1:  # an encoder-decoder beside an LLM (a speech encoder) is not the LLM
        decoders = {k: v for k, v in distinct.items() if not getattr(v[0].model.config, "is_encoder_decoder", False)}
        distinct = decoders if len(decoders) == 1 else distinct
    if len(distinct) > 1:
        have = ", ".join(f"{s.path or '(root)'} ({s.architecture})" for s, _ in distinct.values())
        raise NoEmbeddingError(f"several token embeddings: {have}; name one with submodel=")
    return next(iter(distinct.values()))


def find_embedding(model: PreTrainedModel) -> nn.Module | None:
    """A transformers model's own token embedding; None if it has none (a vision or audio tower)."""
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
    """Whether a module maps ids to vectors: an `nn.Embedding`, or an adapter around one."""
    if isinstance(module, nn.Embedding):
        return True
    parts = list(module.modules())
    if any(isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for m in parts):
        return False  # patches of an image, with embeddings of their positions
    inner = [m for m in parts if isinstance(m, nn.Embedding)]
    weight = getattr(module, "weight", None)
    return bool(inner) and (weight is None or (isinstance(weight, torch.Tensor) and weight.dim() == 2))


class InputEmbeddings:
    """A `get_input_embeddings` for an object that has none of its own: asks the resolver at each call."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self) -> nn.Module:
        """The module to call with token ids."""
        return resolve(Walk(self.model))[1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InputEmbeddings) and other.model is self.model

    __hash__ = object.__hash__
