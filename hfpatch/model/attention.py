"""The attention of a submodel: its modules, their eager function, soft-caps, sinks and the implementation in use."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import CodeType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from hfpatch.compat.implementation import chosen
from hfpatch.model.walk import Submodel, Walk

EAGER = "eager_attention_forward"
"""Name of the eager attention function in transformers' model files."""
REGISTRY = "ALL_ATTENTION_FUNCTIONS"
"""Name there of the registry of implementations."""


@dataclass(frozen=True)
class Attention:
    """One module that computes attention through transformers' `AttentionInterface`.

    Attributes:
        path: Path of the module.
        module: The module.
        eager: The function it calls if the implementation is `eager`.
        sinks: Whether it has sinks: a learned logit per head that takes part in the softmax and attends to no token.
    """

    path: str
    module: nn.Module
    eager: Callable[..., Any]
    sinks: bool


def attentions(walk: Walk, submodel: Submodel) -> list[Attention]:
    """Return the attention modules of a submodel, without those of submodels inside it."""
    out: list[Attention] = []
    for path, module in walk.own(submodel):
        eager = eager_function(type(module))
        if eager is not None:
            sinks = any(isinstance(getattr(module, n, None), torch.Tensor) for n in ("sinks", "sink"))
            out.append(Attention(path, module, eager, sinks))
    return out


@cache
def eager_function(cls: type[nn.Module]) -> Callable[..., Any] | None:
    """Return the eager attention of a class whose forward uses `AttentionInterface`; None for other classes."""
    forward: Any = inspect.unwrap(cls.forward)
    code = getattr(forward, "__code__", None)
    if code is None or not _looks_up(code):
        return None
    names = [n for n in code.co_names if n.endswith(EAGER)]
    return forward.__globals__.get(names[0]) if names else None


def _looks_up(code: CodeType) -> bool:
    """True if code calls a method of the registry, whatever its name; `getattr` of the registry finds nothing."""
    steps = pairwise(dis.get_instructions(code))
    return any(a.argval == REGISTRY and b.opname in ("LOAD_METHOD", "LOAD_ATTR") for a, b in steps)


def softcap(config: Any) -> float | None:
    """Return a config's `cap` of the attention logits, `cap * tanh(logits / cap)`; None if it sets none."""
    for name in ("attn_logit_softcapping", "attention_logit_cap", "attn_logit_softcap"):
        value = getattr(config, name, None)
        if isinstance(value, (int, float)) and value:
            return float(value)
    return None


def implementation(submodel: Submodel) -> str:
    """Return the name of the attention implementation in use."""
    return str(chosen(submodel.model.config))


def exists(name: str) -> bool:
    """True if transformers has an attention implementation of that name, or may load it from the hub."""
    return name == "eager" or "/" in name or name in AttentionInterface().valid_keys()
