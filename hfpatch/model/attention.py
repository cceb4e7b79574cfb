"""The attention of a submodel: which modules compute it, by what function, with what extras."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from hfpatch.compat.implementation import chosen
from hfpatch.model.walk import Submodel, Walk

EAGER = "eager_attention_forward"
"""Name that transformers gives to each model file's own eager attention."""


@dataclass(frozen=True)
class Attention:
    """One module that computes attention through transformers' `AttentionInterface`.

    Attributes:
        eager: The function it runs when the implementation is `eager`.
        sinks: Whether each head has a learned logit that takes part in the softmax and attends to nothing.
    """

    path: str
    module: nn.Module
    eager: Callable[..., Any]
    sinks: bool


def attentions(walk: Walk, submodel: Submodel) -> list[Attention]:
    """Attention modules of a submodel's own, those of submodels inside it left out."""
    out: list[Attention] = []
    for path, module in walk.own(submodel):
        eager = eager_function(type(module))
        if eager is not None:
            sinks = any(isinstance(getattr(module, n, None), torch.Tensor) for n in ("sinks", "sink"))
            out.append(Attention(path, module, eager, sinks))
    return out


@cache
def eager_function(cls: type[nn.Module]) -> Callable[..., Any] | None:
    """The eager attention of a class whose forward looks its attention up in `AttentionInterface`; else None."""
    forward: Any = inspect.unwrap(cls.forward)
    code = getattr(forward, "__code__", None)
    if code is None or "get_interface" not in code.co_names:
        return None
    names = [n for n in code.co_names if n.endswith(EAGER)]
    return forward.__globals__.get(names[0]) if names else None


def softcap(config: Any) -> float | None:
    """The bound that a config puts on attention logits by `cap * tanh(logits / cap)`; None where there is none."""
    for name in ("attn_logit_softcapping", "attention_logit_cap", "attn_logit_softcap"):
        value = getattr(config, name, None)
        if isinstance(value, (int, float)) and value:
            return float(value)
    return None


def implementation(submodel: Submodel) -> str:
    """Name of the attention implementation in use."""
    return str(chosen(submodel.model.config))


def exists(name: str) -> bool:
    """Whether transformers has an attention implementation of that name, or may load it from the hub."""
    return name == "eager" or "/" in name or name in AttentionInterface().valid_keys()
