"""Classes of the user's own: refused unless asked for, then proved on a tiny model in another process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

import hfpatch
from hfpatch.errors import InputError, RefusedError
from hfpatch.lab.tiny import tiny_config
from hfpatch.patching import registry
from hfpatch.patching.proofs import lookup, own
from tests import own_models
from tests.test_plan import decision

STREAM = "fp16-residual-overflow"


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """Proofs that other tests ran are looked up anew."""
    lookup.FOUND.clear()


def made(cls: Any) -> Any:
    torch.manual_seed(0)
    config = own_models.ScaledConfig(**{**tiny_config("llama").to_dict(), "model_type": "scaled_llama"})
    return cls(config).half().eval()


def test_it_is_refused_unless_asked_and_the_refusal_says_how() -> None:
    found = decision(hfpatch.plan(made(own_models.Scaled)), STREAM)
    assert (found.decided, found.code) == ("refused", "foreign-code")
    assert "tests.own_models.ScaledLayer.forward, which no repro" in found.reason
    assert 'prove="own" tries it on a tiny model of your class' in found.reason


@pytest.mark.thorough
@pytest.mark.parametrize("asked", [{"prove": "own"}, {"only": STREAM}, {"include": [STREAM]}])
def test_asked_for_it_is_proved_and_applied(asked: dict[str, Any]) -> None:
    model = made(own_models.Scaled)
    found = decision(hfpatch.plan(model, **asked), STREAM)
    assert (found.decided, "proved here, on a tiny Scaled" in found.reason) == ("applied", True)
    fix = hfpatch.apply(model, verbose=False, **asked)
    assert model.model.layers[0]._forward_pre_hooks
    fix.revert()


@pytest.mark.thorough
def test_what_is_not_cured_is_refused_with_what_was_seen() -> None:
    found = decision(hfpatch.plan(made(own_models.Raw), prove="own"), STREAM)
    assert (found.decided, found.code) == ("refused", "not-cured")
    assert "it does not cure a tiny Raw: " in found.reason
    with pytest.raises(RefusedError, match="does not cure a tiny Raw"):
        hfpatch.apply(made(own_models.Raw), only=STREAM, verbose=False)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("cls", "why"),
    [(own_models.Hangs, "did not finish in 20 s"), (own_models.Exits, "the other process ended with 3")],
)
def test_a_class_that_hangs_or_ends_its_process(cls: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "SECONDS", 20)
    found = decision(hfpatch.plan(made(cls), prove="own"), STREAM)
    assert (found.decided, found.code) == ("refused", "foreign-code")
    assert why in found.reason


@pytest.mark.slow
def test_what_a_class_prints_is_no_answer_and_its_processes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "SECONDS", 300)
    found = decision(hfpatch.plan(made(own_models.Talks), prove="own"), STREAM)
    assert "proved here, on a tiny Talks" in found.reason


@pytest.mark.thorough
def test_a_model_type_that_was_registered_with_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", {"scaled_llama": own_models.ScaledConfig})
    found = decision(hfpatch.plan(made(own_models.Stock)), STREAM)
    assert (found.decided, found.code) == ("refused", "foreign-code")
    found = decision(hfpatch.plan(made(own_models.Stock), prove="own"), STREAM)
    assert "proved here, on a tiny Stock" in found.reason


def test_a_config_that_is_not_json() -> None:
    model = made(own_models.Scaled)
    model.config.odd = {(1, 2): 3}
    found = decision(hfpatch.plan(model, only=STREAM), STREAM)
    assert found.decided == "refused"
    assert "its config cannot be written as JSON: keys must be str" in found.reason


def test_without_process_groups_it_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows."""
    monkeypatch.delattr("os.killpg")
    found = decision(hfpatch.plan(made(own_models.Scaled), prove="own"), STREAM)
    assert "on this system another process cannot be stopped with its children" in found.reason


@pytest.mark.thorough
def test_another_config_is_another_proof() -> None:
    for scale in (1.0, 0.5):
        model = made(own_models.Scaled)
        model.config.branch_scale = scale
        assert "proved here" in decision(hfpatch.plan(model, prove="own"), STREAM).reason
    assert len([s for s in lookup.FOUND if s.patch == registry.get(STREAM).digest]) == 2


def test_a_class_that_no_other_process_can_import() -> None:
    class Local(own_models.Scaled):
        pass

    found = decision(hfpatch.plan(made(Local), prove="own"), STREAM)
    assert "Local is defined in the running script or in a function; put it into a module" in found.reason


def test_layers_put_into_a_stock_model_are_not_in_its_tiny_model(tiny: Any) -> None:
    model = tiny("llama").half()
    for layer in model.model.layers:
        layer.__class__ = own_models.ScaledLayer
        layer.scale = 1.0
    found = decision(hfpatch.plan(model, prove="own"), STREAM)
    assert "LlamaForCausalLM itself is transformers' own, and does not build such layers" in found.reason


def test_a_forward_set_on_a_module_stays_refused() -> None:
    model = made(own_models.Scaled)
    layer = model.model.layers[0]
    layer.forward = functools.partial(layer.forward)
    found = decision(hfpatch.plan(model, prove="own"), STREAM)
    assert found.decided == "refused"
    assert "model.layers.0.forward, set on this module" in found.reason


def test_the_forward_of_the_class_itself_may_be_set_on_a_module(tiny: Any) -> None:
    """As `kernels.kernelize` does on modules that it has no kernel for."""
    model = tiny("llama").half()
    for module in model.modules():
        module.forward = module.forward
    assert decision(hfpatch.plan(model), STREAM).decided == "applied"
    model.model.layers[0].forward = model.model.layers[1].forward
    assert "model.layers.0.forward, set on this module" in decision(hfpatch.plan(model), STREAM).reason


def test_another_word_is_bad_input(tiny: Any) -> None:
    with pytest.raises(InputError, match='want "own" or None as prove='):
        hfpatch.plan(tiny("llama"), prove="mine")  # type: ignore[arg-type]
