"""`plan.apply()` does exactly the plan that was shown, or nothing."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch

import hfpatch
from hfpatch.errors import InputError, RefusedError, StalePlanError
from hfpatch.lab.tiny import tiny_model

FP16 = "fp16-residual-overflow"


@pytest.fixture
def half() -> Any:
    return tiny_model("gemma3_text").half()


def test_it_does_what_apply_does(half: Any, capsys: pytest.CaptureFixture[str]) -> None:
    other = copy.deepcopy(half)
    there = hfpatch.apply(other)
    said = capsys.readouterr().err
    made = hfpatch.plan(half)
    fix = made.apply()
    assert capsys.readouterr().err == said
    assert isinstance(fix, hfpatch.Applied)
    assert fix.model is half
    assert fix.plan == made
    assert fix.to_dict()["plan"] == made.to_dict() == there.plan.to_dict()
    assert hfpatch.status(half).to_dict() == hfpatch.status(other).to_dict()
    fix.revert()
    assert made.apply(verbose=False).edits == made.edits
    assert capsys.readouterr().err == ""


def test_the_arguments_of_the_plan_are_those_of_the_apply(half: Any) -> None:
    fix = hfpatch.plan(half, only=[FP16]).apply(verbose=False)
    assert hfpatch.status(half).patches == (FP16,)
    fix.revert()
    hfpatch.plan(half, exclude=[FP16]).apply(verbose=False)
    assert FP16 not in hfpatch.status(half).patches


def applied(model: Any) -> None:
    hfpatch.apply(model, only=FP16, verbose=False)


def widened(model: Any) -> None:
    model.float()


def exchanged(model: Any) -> None:
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])


def longer(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (applied, rf"{FP16} was to change input dtype of .*, and is now not needed: already applied"),
        (
            widened,
            rf"{FP16} was to change input dtype of .*, and is now not needed: the residual stream is float32",
        ),
        (exchanged, rf"{FP16}: model.layers.1\S* is another module now"),
        (longer, rf"{FP16}: .*model.layers.*"),
    ],
)
def test_a_model_that_has_changed(half: Any, change: Any, told: str) -> None:
    made = hfpatch.plan(half, only=FP16)
    change(half)
    before = hfpatch.status(half).to_dict()
    with pytest.raises(StalePlanError, match=rf"{told}.*make a new plan: hfpatch.plan\(model\)") as error:
        made.apply()
    assert error.value.code == "stale-plan"
    assert hfpatch.status(half).to_dict() == before


def test_another_value_of_an_attribute() -> None:
    model = tiny_model("gemma3_text")
    made = hfpatch.plan(model, only="eager-attention")
    assert made.apply(verbose=False).edits == made.edits
    sdpa = tiny_model("gemma3_text")
    sdpa.set_attn_implementation("sdpa")
    made = hfpatch.plan(sdpa, only="eager-attention")
    assert made.edits
    sdpa.set_attn_implementation("flex_attention")
    with pytest.raises(StalePlanError, match=r"attention of the model itself: sdpa -> eager then, .*flex_attention"):
        made.apply()


def test_what_does_not_matter_to_the_plan_may_change(half: Any) -> None:
    made = hfpatch.plan(half, only=FP16)
    with torch.no_grad():
        half.lm_head.weight.add_(1)
    half.config.use_cache = False
    assert made.apply(verbose=False).edits == made.edits


def test_a_copy_knows_no_model_and_a_plan_outlives_its_model(half: Any) -> None:
    made = hfpatch.plan(half, only=FP16)
    for twin in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):  # noqa: S301
        assert twin.to_dict() == made.to_dict()
        with pytest.raises(StalePlanError, match="is a copy, which has no reference to the model; make a new plan"):
            twin.apply()


def test_the_plan_holds_no_more_of_the_model_than_its_edits() -> None:
    model = tiny_model("gemma3_text").half()
    made = hfpatch.plan(model, only=FP16)
    del model
    gc.collect()
    with pytest.raises(StalePlanError, match="this plan is for a Gemma3ForCausalLM that no longer exists"):
        made.apply()
    assert made.to_dict()["decisions"]


def test_what_was_asked_for_beside_the_others_and_is_refused_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = tiny_model("llama").half()
    model.set_attn_implementation("sdpa")
    hfpatch.apply(model, include="eager-attention").revert()
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("hfpatch: asked for and refused: eager-attention: eager attention overflows in float16")
    hfpatch.apply(model, include=["eager-attention", "rwkv-rescale", "fp32-lm-head"]).revert()
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("hfpatch: asked for and refused: eager-attention")
    assert last.endswith("(and 1 more: print(handle))")
    hfpatch.apply(model)
    assert "asked for" not in capsys.readouterr().err


def test_a_refused_patch_that_was_named(half: Any) -> None:
    made = hfpatch.plan(half, only="lora-target-expansion")
    with pytest.raises(RefusedError, match="lora-target-expansion was asked for and is refused"):
        made.apply()
    with pytest.raises(InputError, match="want True or False as verbose="):
        hfpatch.plan(half).apply(verbose="no")  # type: ignore[arg-type]
