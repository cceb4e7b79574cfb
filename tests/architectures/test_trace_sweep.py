"""No false alarm: a padded training step of every architecture that a tiny model can be made of."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from torch import nn

import hfpatch
from hfpatch.errors import InputError
from hfpatch.lab.tiny import TASKS
from hfpatch.model.source import REJECTIONS
from hfpatch.testing import example_inputs, tiny_model

pytestmark = pytest.mark.architectures

EVERY = [(task, name) for task, known in TASKS.items() for name in sorted(known)]
SHARDS = 12
LEAST = 300
"""Of the 350 models, those that must have been traced."""


def built(task: str, architecture: str) -> nn.Module | None:
    """A tiny model that takes a plain training step; None where there is none (`test_tiny_sweep.py` counts them)."""
    try:
        model = tiny_model(architecture, task=task).train()
        if step(model) is None:
            return None
    except (InputError, *REJECTIONS):
        return None
    return model


def step(model: nn.Module) -> torch.Tensor | None:
    """The loss after its backward pass; None where the model has no loss."""
    model.zero_grad()
    loss: torch.Tensor | None = getattr(model(**example_inputs(model)), "loss", None)
    if loss is not None:
        loss.backward()
    return loss


def alarm(task: str, architecture: str, trained: int) -> str | None:
    """What is wrong with the trace of a healthy model, after some steps of AdamW; `not traced` if there is none."""
    torch.manual_seed(0)  # dropout
    model = built(task, architecture)
    if model is None:
        return "not traced"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(trained):
        step(model)
        optimizer.step()
    with hfpatch.trace(model) as t:
        loss = step(model)
    if loss is None or not loss.isfinite():
        return f"the loss is {loss}"
    if not t.steps[0].of("backward"):
        return "no backward pass was seen"
    return None if t.first_bad is None else t.first_bad.sentence


@pytest.mark.parametrize("trained", [0, 20])
@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_false_alarm(shard: int, trained: int) -> None:
    transformers.logging.set_verbosity(50)
    alarms: dict[tuple[str, str], str] = {}
    mine = EVERY[shard::SHARDS]
    traced = 0
    for task, architecture in mine:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            said = alarm(task, architecture, trained)
        if said == "not traced":
            continue
        traced += 1
        if said is not None:
            alarms[task, architecture] = said
    assert not alarms
    assert traced >= LEAST * len(mine) // len(EVERY) - 3, "fewer tiny models than there were"
