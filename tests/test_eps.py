"""Case 13: which norms are added, which eps they take, and that native ones keep theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FunnelConfig,
    FunnelModel,
    LlamaForCausalLM,
    PreTrainedModel,
    SamConfig,
    SamModel,
    WhisperModel,
)

import hfpatch
from hfpatch.errors import InputError
from hfpatch.lab.tiny import SpeechLLM, tiny_model
from hfpatch.model.norms import is_norm, untrained
from hfpatch.model.survey import Survey
from tests.test_embed import WHISPER


class HandNorm(nn.Module):
    """RMSNorm as people write it, under either name of eps."""

    def __init__(self, width: int, name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        setattr(self, name, 1e-4)


class WithProjector(LlamaForCausalLM):
    """A user's subclass of a stock model that adds modules of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.projector = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32))


class OwnPreTrained(PreTrainedModel):
    """A composite that is itself a PreTrainedModel and shares the LLM's config."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm.config)
        self.norm_in = nn.LayerNorm(24)
        self.llm = llm


def added(model: nn.Module, **words: Any) -> set[str]:
    return set(Survey(model, **words).added)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gemma3", "gpt2", "mixtral", "deepseek_v3"])
def test_stock_models_have_nothing_added(name: str) -> None:
    if name == "deepseek_v3":
        with torch.device("meta"):
            model = DeepseekV3ForCausalLM(DeepseekV3Config())
    else:
        model = tiny_model(name)
    assert added(model) == set()


def test_adapters_are_not_added_modules(tiny: Any) -> None:
    model = get_peft_model(tiny("llama"), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    assert added(model) == set()
    assert added(torch.compile(tiny("llama"), backend="eager")) == set()


def test_what_is_added_is_found_wherever_it_is(tiny: Any) -> None:
    assert added(SpeechLLM(tiny("llama"))) == {"ln_speech", "speech_proj"}
    subclass = WithProjector(tiny("llama").config)
    assert added(subclass) == {"projector", "projector.0", "projector.1"}
    assert added(OwnPreTrained(tiny("llama"))) == {"norm_in"}
    inserted = tiny("llama")
    inserted.model.layers[2].adapter_norm = nn.LayerNorm(32)
    assert added(inserted) == {"model.layers.2.adapter_norm"}
    assert added(tiny("llama"), added=["model.layers.0.mlp"]) >= {"model.layers.0.mlp.up_proj"}


@pytest.mark.parametrize("given", ["nothing.here", nn.Linear(1, 1)])
def test_a_named_added_module_that_is_not_there(given: Any, tiny: Any) -> None:
    with pytest.raises(InputError, match="added_modules: "):
        hfpatch.plan(tiny("llama"), added_modules=[given])


@pytest.mark.parametrize("name", ["eps", "variance_epsilon"])
def test_hand_written_norms_under_either_name(name: str, tiny: Any) -> None:
    model = nn.ModuleDict({"norm": HandNorm(8, name), "llm": tiny("gemma3_text")})
    with hfpatch.apply(model, verbose=False):
        assert getattr(model["norm"], name) == 1e-6
    assert getattr(model["norm"], name) == 1e-4


def test_inside_a_subclass_and_inserted(tiny: Any) -> None:
    for model, norm in ((m := WithProjector(tiny("llama").config), m.projector[1]),):
        hfpatch.apply(model, verbose=False)
        assert norm.eps == 1e-6
    inserted = tiny("llama")
    inserted.model.layers[2].adapter_norm = nn.LayerNorm(32)
    hfpatch.apply(inserted, verbose=False)
    assert inserted.model.layers[2].adapter_norm.eps == 1e-6


def test_a_speech_encoder_and_its_norms_are_native(tiny: Any) -> None:
    speech = SpeechLLM(tiny("gemma3_text"), width=32)
    model = nn.ModuleDict({"encoder": WhisperModel(WHISPER).encoder, "speech": speech})
    fix = hfpatch.apply(model, verbose=False)
    assert [e.path for e in fix.edits if e.slot == "eps"] == ["speech.ln_speech"]
    assert model["encoder"].layer_norm.eps == 1e-5


@pytest.mark.need('"raise eps from 1e-5 to 1e-6"', "refused", 'that lowers it; hfpatch raises no eps "for stability"')
def test_native_norms_only_when_named(tiny: Any) -> None:
    model = tiny("llama")
    model.config.rms_norm_eps = 1e-6
    model.model.layers[0].input_layernorm.variance_epsilon = 1e-5
    assert not hfpatch.plan(model).edits
    options = {"eps-alignment": {"modules": ["model.layers.0.*"]}}
    found = next(d for d in hfpatch.plan(model, options=options).decisions if d.patch == "eps-alignment")
    assert (found.decided, len(found.edits)) == ("opt-in" if not untrained(found.edits[0].module) else "applied", 1)


def test_several_backbones(tiny: Any) -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm(8, eps=1e-4), "a": tiny("llama"), "b": tiny("gpt2")})
    fix = hfpatch.apply(model, verbose=False)
    assert model["norm"].eps == 1e-4
    refused = [d.reason for d in fix.plan.of("refused") if d.patch == "eps-alignment"]
    assert refused == ["which backbone the added norms feed is unknown: set the option backbone to one of ['a', 'b']"]
    hfpatch.apply(model, verbose=False, options={"eps-alignment": {"backbone": "b"}})
    assert model["norm"].eps == 1e-5


def test_what_proves_that_a_norm_is_untrained() -> None:
    norm = nn.LayerNorm(4)
    assert untrained(norm)
    assert untrained(nn.RMSNorm(4))
    assert not untrained(nn.LayerNorm(4, elementwise_affine=False))
    frozen = nn.LayerNorm(4).requires_grad_(requires_grad=False)
    assert not untrained(frozen)
    assert not untrained(nn.LayerNorm(4, device="meta"))
    with torch.no_grad():
        norm.weight[2] = 1.0001
    assert not untrained(norm)


@pytest.mark.parametrize(
    ("module", "want"),
    [
        (nn.LayerNorm(4), True),
        (nn.RMSNorm(4), True),
        (HandNorm(4, "eps"), True),
        (type("Rescaling", (HandNorm,), {})(4, "eps"), True),
        (type("Rescaling", (HandNorm,), {})(4, "smallest"), False),
        (type("Grouped", (nn.GroupNorm,), {})(2, 4), False),
        (nn.BatchNorm1d(4), False),
        (nn.GroupNorm(2, 4), False),
        (nn.Linear(4, 4), False),
    ],
)
def test_is_norm(module: nn.Module, want: bool) -> None:
    assert is_norm(module) is want


class PropertyNorm(HandNorm):
    """eps behind a property, with or without a setter."""

    def __init__(self, width: int) -> None:
        super().__init__(width, "held")

    @property
    def eps(self) -> float:
        return self.held

    @eps.setter
    def eps(self, value: float) -> None:
        self.held = value


def test_eps_behind_a_property_is_left_alone_and_hinders_nothing(tiny: Any) -> None:
    model = SpeechLLM(tiny("llama"))
    model.other = PropertyNorm(24)
    fix = hfpatch.apply(model, verbose=False)
    assert (model.ln_speech.eps, model.other.eps) == (1e-6, 1e-4)
    fix.revert()
    assert model.ln_speech.eps == 1e-4


def test_an_attribute_is_written_past_a_setter_of_the_users(tiny: Any) -> None:
    """A setter may write elsewhere (a compiled module's does); written, read and restored is in one place."""

    class Picky(nn.LayerNorm):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "eps" and value == 1e-6:
                raise OSError("validated after the write")

    model = SpeechLLM(tiny("llama"))
    model.picky = Picky(24, eps=1e-4)
    fix = hfpatch.apply(model, only="eps-alignment")
    assert model.picky.eps == 1e-6
    fix.revert()
    assert model.picky.eps == 1e-4
    assert not hfpatch.status(model).edits


def test_half_precision_proves_nothing_without_a_bias() -> None:
    """An AdamW step of 1e-3 is lost beside a 1 in bfloat16, not beside a 0."""
    for norm, want in ((nn.RMSNorm(4), False), (nn.LayerNorm(4), True)):
        norm.bfloat16()
        optimizer = torch.optim.AdamW(norm.parameters(), lr=1e-3, weight_decay=0)
        assert untrained(norm) is want
        norm(torch.randn(2, 4).bfloat16()).sum().backward()
        optimizer.step()
        assert not untrained(norm)


def test_copies_that_peft_keeps_are_decided_together(tiny: Any) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["ln_speech"])
    model = get_peft_model(SpeechLLM(tiny("llama")), config)
    model.add_adapter("b", config)
    hfpatch.apply(model, verbose=False)
    assert {m.eps for p, m in model.named_modules() if "ln_speech." in p and is_norm(m)} == {1e-6}


def test_a_stock_class_that_rejects_a_cut_config_has_nothing_added() -> None:
    with torch.device("meta"):
        assert added(FunnelModel(FunnelConfig())) == set()


def test_attention_classes_that_follow_the_implementation_are_not_added() -> None:
    with torch.device("meta"):
        assert added(SamModel(SamConfig())) == set()


def test_a_loss_that_smooths_labels_is_no_norm() -> None:
    class Smoothed(nn.Module):
        def __init__(self, epsilon: float) -> None:
            super().__init__()
            self.epsilon, self.weight = epsilon, nn.Parameter(torch.ones(8))

    assert not is_norm(Smoothed(0.1))
    assert is_norm(Smoothed(1e-6))
