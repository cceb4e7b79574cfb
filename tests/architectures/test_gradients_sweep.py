"""Adapters behind frozen embeddings and in towers, in every architecture: a step runs, and each gets its gradient."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hfpatch
from hfpatch.errors import InputError
from hfpatch.lab.cut_off import lost_to_checkpointing
from hfpatch.lab.example import example_inputs
from hfpatch.lab.like import FAILED
from hfpatch.lab.tiny import TASKS, tiny_model
from hfpatch.lab.written import raises_behind_frozen_embeddings

pytestmark = pytest.mark.architectures

PAIRS = sorted((task, name) for task, names in TASKS.items() for name in names)
SHARDS = 8
WRITE = {"blip", "blt", "ctrl", "git", "kosmos-2", "udop", "voxtral_realtime"}
"""Architectures that write into their embeddings (transformers 5.24): at least these must be cured."""
WITHOUT = ("does not support", "is not compatible with gradient checkpointing")
"""What transformers says of a class that it does not checkpoint."""


def models(shard: int) -> Any:
    for task, name in PAIRS[shard::SHARDS]:
        try:
            model = tiny_model(name, task=task)
            example_inputs(model)
        except (InputError, *FAILED):
            continue
        yield task, name, model


@pytest.mark.parametrize("shard", range(SHARDS))
def test_clone_embeds_where_a_step_raises_and_nowhere_else(shard: int) -> None:
    wrong: list[str] = []
    cured: set[str] = set()
    for task, name, model in models(shard):
        before = raises_behind_frozen_embeddings(model)
        raised = before is not None and "in-place operation" in before
        fix = hfpatch.apply(model, only="clone-embeds", verbose=False)
        if "is not known" in fix.plan.decisions[0].reason:
            assert not raised, name
        elif bool(fix.edits) is not raised:
            wrong.append(f"{task} {name}: {before}; {fix.plan.decisions[0].reason}")
        elif raised:
            after = raises_behind_frozen_embeddings(model)
            cured |= {name} if after is None else set()
            wrong += [f"{task} {name}: {after}"] if after else []
    assert not wrong, "\n".join(wrong)
    assert {name for _, name in PAIRS[shard::SHARDS]} & WRITE == cured & WRITE


def adapted(model: Any) -> Any:
    from peft import inject_adapter_in_model

    inject_adapter_in_model(hfpatch.lora_config(model, r=2, scope="all", verbose=False), model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("shard", range(SHARDS))
def test_tower_input_grads_where_adapters_are_cut_off_and_nowhere_else(shard: int) -> None:
    wrong: list[str] = []
    refused: list[str] = []
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        for task, name, model in models(shard):
            if task == "causal" and name in {**TASKS["multimodal"], **TASKS["seq2seq"]}:
                continue
            hfpatch.apply(model, only="clone-embeds", verbose=False)
            try:
                lost = lost_to_checkpointing(adapted(model))
            except (InputError, *FAILED) as error:
                if not any(words in str(error) for words in WITHOUT):
                    refused.append(f"{task} {name}: {error}")
                continue
            fix = hfpatch.apply(model, only="tower-input-grads", verbose=False)
            if bool(fix.edits) is not bool(lost):
                wrong.append(f"{task} {name}: lost {lost[:2]}; {fix.plan.decisions[0].reason}")
            elif lost and (still := lost_to_checkpointing(model)):
                wrong.append(f"{task} {name}: still {still[:2]}")
    assert not wrong, "\n".join(wrong)
    print(*refused, sep="\n")
