"""Whatever is applied, in whatever order, however often: reverting gives back the model that was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import hfpatch
from hfpatch.lab.tiny import SpeechLLM, tiny_model
from hfpatch.patching import registry
from tests.fingerprint import fingerprint

IDS = sorted(registry.entries())
BUILT = {name: SpeechLLM(tiny_model(name)).half() for name in ("llama", "gemma3_text")}

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("apply"), st.sampled_from(IDS)),
        st.tuples(st.just("bare"), st.none()),
        st.tuples(st.just("revert"), st.integers(0, 5)),
        st.tuples(st.just("copy"), st.none()),
        st.tuples(st.just("plan"), st.none()),
    ),
    max_size=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(sorted(BUILT)), steps=STEPS, train=st.booleans(), hooked=st.booleans())
@pytest.mark.slow
def test_any_history_is_undone(name: str, steps: list[tuple[str, Any]], train: bool, hooked: bool) -> None:
    model: nn.Module = copy.deepcopy(BUILT[name]).train(train)
    if hooked:
        model.llm.model.layers[0].register_forward_pre_hook(print)
        model.ln_speech.weight.requires_grad_(requires_grad=False)
    before = fingerprint(model)
    handles: list[hfpatch.Applied] = []
    for step, what in steps:
        if step == "apply":
            handles.append(hfpatch.apply(model, include=what, verbose=False, exclude=[i for i in IDS if i != what]))
        elif step == "bare":
            handles.append(hfpatch.apply(model, verbose=False))
        elif step == "revert" and handles:
            handles[what % len(handles)].revert()
        elif step == "copy":
            hfpatch.revert(copy.deepcopy(model))
        elif step == "plan":
            hfpatch.plan(model)
    applied = {r.patch for _, r in hfpatch.status(model).records}
    assert applied <= set(IDS)
    hfpatch.revert(model)
    assert fingerprint(model) == before
    assert not hfpatch.status(model)


TOGETHER = [
    "embed-token-resolver",
    "eps-alignment",
    "fp16-residual-overflow",
    "fp32-attention-logits",
    "projection-init",
]
"""Those that go with a float16 speech LLM all at once."""


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(order=st.permutations(TOGETHER), undo=st.permutations(TOGETHER))
def test_patches_commute_and_undo_in_any_order(order: list[str], undo: list[str]) -> None:
    model = copy.deepcopy(BUILT["gemma3_text"])
    before = fingerprint(model)
    handles = {i: hfpatch.apply(model, only=i, verbose=False) for i in order}
    assert set(hfpatch.status(model).patches) == set(TOGETHER)
    for patch_id in undo:
        handles[patch_id].revert()
        assert patch_id not in hfpatch.status(model).patches
    assert fingerprint(model) == before


def test_parameters_trained_while_patched_keep_their_values() -> None:
    """A revert takes back the patch, not the training."""
    model = copy.deepcopy(BUILT["llama"])
    fix = hfpatch.apply(model, verbose=False)
    with torch.no_grad():
        model.speech_proj.weight.add_(1)
    trained = model.speech_proj.weight.clone()
    fix.revert()
    assert torch.equal(model.speech_proj.weight, trained)
