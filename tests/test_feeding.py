"""Case 62: of the norms a user added, those on the way into the language model are aligned, and no encoder's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import WhisperModel

import hfpatch
from hfpatch.lab.tiny import tiny_model
from tests.fingerprint import fingerprint
from tests.sampling import first_quick
from tests.test_embed import WHISPER


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.map = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.map(self.norm(x))


class Stages(nn.Module):
    """An encoder as people write it: stages of blocks, and a norm at its end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.Sequential(Block(width), Block(width)) for _ in range(2)])
        self.out_norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.out_norm(x)


class Attending(nn.Module):
    """An encoder of one layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.after = nn.MultiheadAttention(width, 4, batch_first=True), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(x + self.attention(x, x, x)[0])


class Plain(nn.Module):
    """An encoder without a list or attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.map, self.after = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(torch.relu(self.map(x)))


def torchs(width: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 48, batch_first=True)
    return nn.TransformerEncoder(layer, 1, norm=nn.LayerNorm(width))


class Speech(nn.Module):
    def __init__(self, encoder: nn.Module, *, norm: bool = True) -> None:
        super().__init__()
        self.llm = tiny_model("gemma3_text")
        size = self.llm.config.hidden_size
        self.encoder, self.ln = encoder, nn.LayerNorm(24, eps=1e-4) if norm else nn.Identity()
        self.connector = nn.Sequential(nn.Linear(24, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, size))
        self.head_norm, self.head = nn.LayerNorm(size), nn.Linear(size, 2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(1.1)

    def forward(self, features: torch.Tensor, input_ids: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
        speech = self.connector(self.ln(self.encoder(features)))
        embeds = torch.cat([speech, self.llm.get_input_embeddings()(input_ids)], 1)
        out = self.llm(inputs_embeds=embeds, output_hidden_states=True)
        return self.head(self.head_norm(out.hidden_states[-1]))


def aligned(model: nn.Module) -> list[str]:
    made = hfpatch.plan(model, include="suggested")
    return [edit.path for edit in made.edits if edit.slot == "eps"]


def reasons(model: nn.Module) -> str:
    return "; ".join(d.reason for d in hfpatch.plan(model).decisions if d.patch == "eps-alignment")


@pytest.mark.parametrize("encoder", [torchs, Stages, Attending, Plain], ids=lambda e: e.__name__)
@pytest.mark.parametrize("frozen", first_quick([True, False]))
def test_an_encoders_own_norms_stay(encoder: Any, frozen: bool) -> None:
    model = Speech(encoder(24))
    model.encoder.requires_grad_(not frozen)
    assert aligned(model) == ["ln", "connector.2"]
    why = reasons(model)
    assert all(word in why for word in ("left alone: ", "encoder.", "head_norm")), why


@pytest.mark.parametrize("encoder", [torchs, Stages, Attending, Plain], ids=lambda e: e.__name__)
def test_an_encoder_whose_last_norm_is_before_the_projector(encoder: Any) -> None:
    assert aligned(Speech(encoder(24), norm=False)) == ["connector.2"]


def test_a_run_leaves_no_trace() -> None:
    model = Speech(Stages(24))
    before, state = fingerprint(model), torch.get_rng_state()
    hfpatch.plan(model, only="eps-alignment")
    assert fingerprint(model) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_half_precision_and_adapters() -> None:
    model = Speech(torchs(24)).half()
    model.llm = get_peft_model(model.llm, LoraConfig(r=2, target_modules=["q_proj"]))
    assert aligned(model) == ["ln", "connector.2"]


class Helped(nn.Module):
    """Helper methods, a transformers encoder, two modalities; the norm after the projector feeds too."""

    def __init__(self) -> None:
        super().__init__()
        self.llm = tiny_model("llama")
        size = self.llm.config.hidden_size
        self.speech_encoder = WhisperModel(WHISPER).encoder
        wide = WHISPER.d_model
        self.ln_speech, self.ln_audio = nn.LayerNorm(wide), nn.LayerNorm(24)
        self.projector, self.after = nn.Linear(wide + 24, size), nn.LayerNorm(size)
        with torch.no_grad():
            for norm in (self.ln_speech, self.ln_audio, self.after):
                norm.weight.mul_(1.1)

    def encode(self, features: torch.Tensor, audio: torch.Tensor) -> torch.Tensor:
        speech = self.ln_speech(self.speech_encoder(features).last_hidden_state)
        return self.after(self.projector(torch.cat([speech, self.ln_audio(audio)], -1)))

    def forward(self, features: torch.Tensor, audio: torch.Tensor, input_ids: torch.Tensor) -> Any:
        embeds = torch.cat([self.encode(features, audio), self.llm.model.embed_tokens(input_ids)], 1)
        return self.llm(inputs_embeds=embeds)


def test_helpers_and_two_modalities() -> None:
    assert aligned(Helped()) == ["ln_speech", "ln_audio", "after"]


class NotRun(Speech):
    def forward(self, batch: dict[str, Any]) -> Any:
        return super().forward(batch["features"], batch["input_ids"])


def test_a_forward_that_cannot_be_run_is_judged_by_structure() -> None:
    model = NotRun(torchs(24))
    assert aligned(model) == ["connector.2"]
    assert "ln (it is unknown what it feeds)" in reasons(model)
    model.connector = nn.Linear(24, model.llm.config.hidden_size)
    assert aligned(model) == ["ln"]
