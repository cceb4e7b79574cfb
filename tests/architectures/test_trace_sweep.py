"""No false alarm: a padded training step of every causal architecture that a tiny model can be made of."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hfpatch
from hfpatch.model.source import REJECTIONS
from hfpatch.model.tiny import tiny_config, tiny_model

pytestmark = pytest.mark.architectures

SEEN = (13, 17, 13, 18, 18, 16, 13, 15)
"""Tiny models of each shard that take a training step, counted on transformers 5.24: 123 of 196 architectures."""

SHARDS = len(SEEN)
LARGEST = 30_000_000
"""Parameters; some configs keep a large part however they are shrunk."""


def built(architecture: str) -> nn.Module | None:
    """A tiny model that takes a plain training step; None where there is none yet."""
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(tiny_config(architecture)).parameters())
        if size > LARGEST:
            return None
        model = tiny_model(architecture).train()
        step(model)
    except REJECTIONS:
        return None
    return model


def step(model: nn.Module) -> torch.Tensor:
    ids = (torch.arange(24).reshape(2, 12) * 7 + 3) % 64
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    model.zero_grad()
    loss: torch.Tensor = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    loss.backward()
    return loss


@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_false_alarm(shard: int) -> None:
    transformers.logging.set_verbosity(50)
    alarms: list[str] = []
    seen = 0
    for architecture in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)[shard::SHARDS]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = built(architecture)
            if model is None:
                continue
            seen += 1
            with hfpatch.trace(model) as t:
                loss = step(model)
        assert loss.isfinite(), architecture
        assert len(t.steps) == 1, architecture
        assert t.steps[0].of("backward"), architecture
        if t.first_bad is not None:
            alarms.append(f"{architecture}: {t.first_bad.sentence}")
    assert not alarms
    assert seen >= SEEN[shard], "fewer tiny models than there were"
