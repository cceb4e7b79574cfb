"""Adapters in a tower get their gradient under reentrant checkpointing, and the same one as without it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from transformers import PreTrainedModel, WhisperConfig, WhisperModel
from transformers.models.whisper import modeling_whisper

import hfpatch
from hfpatch.lab.cut_off import cut_off, gives_by_position, returns_tensors
from hfpatch.lab.like import outputs
from hfpatch.lab.shrink import shrunk
from hfpatch.model.survey import Survey
from hfpatch.testing import example_inputs, tiny_model
from tests.fingerprint import fingerprint
from tests.sampling import first_quick
from tests.test_check import kwargs_name

ID = "tower-input-grads"
CUT = ("qwen3_vl", "gemma4", "glm4v", "idefics", "glmasr", "nemotron_h_omni", "fun_asr_nano", "blip-2", "kosmos-2")
WHOLE = ("llava", "qwen2_vl", "internvl", "llama", "whisper")
KEY = kwargs_name()
REENTRANT = {KEY: True, f"{KEY}_kwargs": {"use_reentrant": True}}


def adapted(architecture: str) -> tuple[Any, dict[str, Any]]:
    model = tiny_model(architecture)
    batch = example_inputs(model)
    torch.manual_seed(1)
    lora = get_peft_model(model, hfpatch.lora_config(model, r=2, scope="all", verbose=False))
    for name, parameter in lora.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return lora, batch


def checkpointed(model: Any) -> Any:
    (model.base_model.model if hasattr(model, "peft_config") else model).gradient_checkpointing_enable(
        {"use_reentrant": True}
    )
    return model


def gradients(model: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The gradients of a step in training mode, without dropout."""
    model.zero_grad(set_to_none=True)
    torch.autograd.backward([t.float().square().mean() for t in outputs(model, batch) if t.requires_grad])
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def logits(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**batch).logits


@pytest.mark.parametrize("architecture", first_quick(CUT))
def test_every_adapter_gets_the_gradient_that_it_has_without_checkpointing(architecture: str) -> None:
    model, batch = adapted(architecture)
    want = gradients(model, batch)
    checkpointed(model)
    assert len(gradients(model, batch)) < len(want)
    stock = logits(model, batch)
    before = fingerprint(model)
    fix = hfpatch.apply(model, only=ID, verbose=False)
    assert torch.equal(logits(model, batch), stock)
    found = gradients(model, batch)
    assert found.keys() == want.keys()
    for name, gradient in want.items():
        assert torch.allclose(found[name], gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max())), name
    fix.revert()
    model.zero_grad(set_to_none=True)
    assert fingerprint(model)[""]["hooks"] == before[""]["hooks"]
    assert len(gradients(model, batch)) < len(want)


@pytest.mark.parametrize("architecture", first_quick(WHOLE, every=4))
def test_a_model_of_which_nothing_is_cut_off_is_left_alone(architecture: str) -> None:
    model, batch = adapted(architecture)
    want = gradients(model, batch)
    assert hfpatch.plan(model, only=ID).decisions[0].decided == "not needed"
    if architecture != "whisper":
        assert gradients(checkpointed(model), batch).keys() == want.keys()


class TestWhatDecides:
    def decided(self, model: Any) -> str:
        return hfpatch.plan(model, only=ID).decisions[0].decided

    def test_nothing_trains_in_the_tower(self) -> None:
        model = tiny_model("qwen3_vl")
        lora = get_peft_model(model, hfpatch.lora_config(model, r=2, verbose=False))
        assert self.decided(lora) == "not needed"

    def test_what_comes_into_the_tower_trains_too(self) -> None:
        model, batch = adapted("qwen3_vl")
        want = gradients(model, batch)
        assert self.decided(model) == "applied"
        model.base_model.model.model.visual.patch_embed.requires_grad_(True)
        assert self.decided(model) == "not needed"
        assert set(want) <= set(gradients(checkpointed(model), batch))

    def test_everything_is_frozen(self) -> None:
        model = tiny_model("qwen3_vl").requires_grad_(False)
        (decision,) = (d for d in hfpatch.plan(model).decisions if d.patch == ID)
        assert (decision.decided, len(decision.edits)) == ("opt-in", 1)

    def test_everything_trains(self) -> None:
        assert self.decided(tiny_model("qwen3_vl").requires_grad_(True)) == "not needed"


def test_before_the_adapters() -> None:
    model = tiny_model("qwen3_vl").requires_grad_(False)
    batch = example_inputs(model)
    hfpatch.apply(model, include=ID, verbose=False)
    lora = get_peft_model(model, hfpatch.lora_config(model, r=2, scope="all", verbose=False))
    want = gradients(lora, batch)
    assert gradients(checkpointed(lora), batch).keys() == want.keys()
    hfpatch.revert(lora)
    assert len(gradients(lora, batch)) < len(want)


class Speech(nn.Module):
    """A model of the user's own: a sound encoder, a projector and a language model."""

    def __init__(self, encoder: PreTrainedModel, llm: PreTrainedModel) -> None:
        super().__init__()
        self.encoder, self.llm = encoder, llm
        self.projector = nn.Linear(encoder.config.d_model, llm.config.hidden_size)

    def forward(self, input_features: torch.Tensor, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        speech = self.projector(self.encoder(input_features).last_hidden_state)
        embeds = torch.cat([speech, self.llm.get_input_embeddings()(input_ids)], dim=1)
        labels = torch.cat([labels.new_full(speech.shape[:2], -100), labels], dim=1)
        return self.llm(inputs_embeds=embeds, labels=labels)


def test_an_encoder_in_a_model_of_the_users_own() -> None:
    from peft import LoraConfig

    torch.manual_seed(0)
    config = WhisperConfig(**shrunk(WhisperConfig, max_source_positions=16))
    ids = torch.arange(12).reshape(2, 6)
    batch = {"input_features": torch.randn(2, config.num_mel_bins, 32), "input_ids": ids, "labels": ids}
    model = Speech(WhisperModel(config).encoder, tiny_model("llama"))
    lora = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "fc1"]))  # type: ignore[arg-type]
    want = gradients(lora, batch)
    for part in (model.encoder, model.llm):
        part.gradient_checkpointing_enable({"use_reentrant": True})
    assert len(gradients(lora, batch)) < len(want)
    assert [s.layers for s in cut_off(Survey(lora)).starts] == ["base_model.model.encoder.layers"]
    hazard = next(h for h in hfpatch.check(lora, {}, batch=batch) if h.id == "checkpointing-cuts-off")
    assert hazard.change.startswith('hfpatch.apply(model, include=["tower-input-grads"]) (tried on this batch')
    hfpatch.apply(lora, only=ID, verbose=False)
    assert gradients(lora, batch).keys() == want.keys()


@pytest.mark.parametrize("architecture", first_quick(CUT[:4]))
def test_check_advises_it_and_is_content_with_it(architecture: str) -> None:
    model, batch = adapted(architecture)
    hazard = next(h for h in hfpatch.check(model, REENTRANT, batch=batch) if h.id == "checkpointing-cuts-off")
    assert hazard.change.startswith('hfpatch.apply(model, include=["tower-input-grads"]) (tried on this batch')
    hfpatch.apply(model, include=ID, verbose=False)
    assert "checkpointing-cuts-off" not in hfpatch.check(model, REENTRANT, batch=batch).ids


class TestLife:
    def test_copies_and_pickles(self) -> None:
        model, batch = adapted("qwen3_vl")
        want = gradients(model, batch)
        model.zero_grad(set_to_none=True)
        hfpatch.apply(model, only=ID, verbose=False)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
            assert gradients(checkpointed(other), batch).keys() == want.keys()
            hfpatch.revert(other)
            assert len(gradients(other, batch)) < len(want)

    def test_nothing_begins_outside_of_training(self) -> None:
        model = tiny_model("qwen3_vl").requires_grad_(False)
        batch = example_inputs(model)
        hfpatch.apply(model, include=ID, verbose=False)
        assert not model.eval()(**batch).logits.requires_grad
        assert model.train()(**batch).logits.requires_grad
        with torch.no_grad():
            assert not model(**batch).logits.requires_grad


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
ENCODERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "WhisperEncoder": (
        "q_proj",
        {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64},
        {"input_features": torch.linspace(-1, 1, 80 * 3000).reshape(1, 80, 3000)},
    ),
    "Wav2Vec2BertModel": ("linear_q", SMALL, {"input_features": torch.arange(6400.0).sin().reshape(1, 40, 160)}),
    "CLIPVisionModel": (
        "q_proj", {**SMALL, "image_size": 32, "patch_size": 8},
        {"pixel_values": torch.linspace(-1, 1, 3072).reshape(1, 3, 32, 32)},
    ),
}  # fmt: skip
"""Class of a tower of a model of one's own -> what LoRA adapts, its config, what it reads."""


@pytest.mark.parametrize("name", first_quick(ENCODERS, every=3))
def test_a_tower_in_a_model_of_ones_own(name: str) -> None:
    adapts, sizes, batch = ENCODERS[name]
    cls: Any = getattr(transformers, name, modeling_whisper.WhisperEncoder)
    torch.manual_seed(0)
    tower = cls(cls.config_class(**sizes, apply_spec_augment=False, layerdrop=0.0))
    lora = LoraConfig(r=2, target_modules=[adapts], init_lora_weights=False)
    held = nn.ModuleDict({"tower": inject_adapter_in_model(lora, tower), "llm": tiny_model("llama")})
    want = weighed(tower, batch)
    assert len(want) == 4
    tower.gradient_checkpointing_enable({"use_reentrant": True})
    assert not [t for t in outputs(tower, batch) if t.requires_grad]
    fix = hfpatch.apply(held, only=ID, verbose=False)
    assert fix.edits, str(fix)
    found = weighed(tower, batch)
    assert found.keys() == want.keys()
    for path, gradient in want.items():
        assert torch.allclose(found[path], gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max())), path


def weighed(tower: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gradients of an uneven sum: the square of what a norm writes has none."""
    tower.zero_grad(set_to_none=True)
    out = outputs(tower, batch)[0]
    (out * torch.arange(out.numel()).view_as(out).sin()).sum().backward()
    return {n: p.grad.clone() for n, p in tower.named_parameters() if p.grad is not None}


def test_a_wav2vec2_in_a_model_of_ones_own_cuts_nothing_off() -> None:
    cls: Any = transformers.Wav2Vec2Model
    tower = cls(cls.config_class(**SMALL, apply_spec_augment=False, layerdrop=0.0))
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    held = nn.ModuleDict({"tower": inject_adapter_in_model(lora, tower), "llm": tiny_model("llama")})
    assert hfpatch.plan(held, only=ID).decisions[0].decided == "not needed"
    tower.gradient_checkpointing_enable({"use_reentrant": True})
    assert outputs(tower, {"input_values": torch.linspace(-1, 1, 4000).sin().reshape(1, 4000)})[0].requires_grad


class ByPosition(nn.Module):
    """Calls its layers as transformers does."""

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        for at, layer in enumerate(self.layers[:2]):
            stream = layer(stream, at=at)
        return stream


class ByKeyword(nn.Module):
    """Calls them by keyword: a reentrant checkpoint passes on no gradient."""

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            stream = layer(hidden_states=stream)
        return stream


class Named(nn.Module):
    """Returns an object: a reentrant checkpoint passes on no gradient either."""

    def forward(self, stream: torch.Tensor) -> Any:
        return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=stream)


def test_layers_that_return_an_object_are_tried() -> None:
    assert returns_tensors(type(tiny_model("llama").model.layers[0]))
    assert returns_tensors(ByPosition)
    assert not returns_tensors(Named)


def test_layers_that_are_called_by_keyword_are_tried() -> None:
    """Their signature does not tell; nor does a list that the forward is not seen to go over."""
    assert gives_by_position(ByPosition, "layers")
    assert not gives_by_position(ByKeyword, "layers")
    assert not gives_by_position(ByPosition, "blocks")
    assert gives_by_position(transformers.LlamaModel, "layers")
