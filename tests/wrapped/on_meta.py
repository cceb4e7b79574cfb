"""A model that is built without memory, and gets its weights later: before the patch, or after it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedModel

import hfpatch
from hfpatch.compat.modules import buffers
from hfpatch.guarding.checks import clean_name
from tests.cells import Outcome, call, close, ends, in_force, same_gradients
from tests.interrupts import SUBJECTS

Loads = Callable[[nn.Module, nn.Module], None]
"""Gives a model on meta the weights of another."""


def assigned(kind: str, order: str) -> Outcome:
    """Parameters on meta, buffers in memory."""
    return _row(kind, order, init_empty_weights, _assign)


def emptied(kind: str, order: str) -> Outcome:
    """Everything on meta. The buffers that no checkpoint has are set as well, which is the user's work there."""
    return _row(kind, order, lambda: torch.device("meta"), _empty_and_load)


def _assign(model: nn.Module, source: nn.Module) -> None:
    model.load_state_dict(copy.deepcopy(source.state_dict()), assign=True)


def _empty_and_load(model: nn.Module, source: nn.Module) -> None:
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    for mine, theirs in zip(model.modules(), source.modules(), strict=True):
        for name, value in buffers(theirs).items():
            if value is not None:
                buffers(mine)[name] = value.clone()


def _load(load: Loads, model: nn.Module, source: nn.Module) -> None:
    load(model, source)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.tie_weights()  # either way of loading leaves two parameters where there was one
    assert not any(p.is_meta for p in model.parameters())


def _row(kind: str, order: str, empty: Callable[[], AbstractContextManager[object]], load: Loads) -> Outcome:
    subject = SUBJECTS[kind]
    source = subject.make().eval()
    stock, plain = call(source), copy.deepcopy(source)
    hfpatch.apply(plain, only=subject.patch, verbose=False)
    wanted = call(plain)
    with empty():
        model = subject.make().eval()
    assert all(p.is_meta for p in model.parameters())
    if order == "before":
        _load(load, model, source)
    fix = hfpatch.apply(model, only=subject.patch, verbose=False)
    if not fix.edits:
        (decision,) = fix.plan.decisions
        assert order == "after", decision.reason
        assert "plan again" in decision.reason, decision.reason
        return "refused", decision.reason
    if order == "after":
        assert not hfpatch.status(model).lapsed, str(hfpatch.status(model))
        _load(load, model, source)
    in_force(fix, model)
    close(call(model), wanted)
    same_gradients(model, plain, {clean_name(name) for name, _ in source.named_parameters()})
    assert not hfpatch.status(model).lapsed, "an edit is gone after a step"
    hfpatch.revert(model)
    return ends(model, stock, "")
