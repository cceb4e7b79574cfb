"""verify on real weights: Whisper base, its encoder before Gemma 3 270M, and Gemma itself after casts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

import hfpatch
from tests.real.inputs import RATE, speech

pytestmark = pytest.mark.real

FRAMES = 64
"""Positions of Whisper's encoder that the speech LLM keeps."""


@pytest.fixture(scope="module")
def features() -> torch.Tensor:
    """`[1, 80, 3000]`, as Whisper reads sound."""
    return WhisperFeatureExtractor()(speech(), sampling_rate=RATE, return_tensors="pt").input_features


@pytest.fixture(scope="module")
def whisper(whisper_dir: Path) -> Any:
    return WhisperForConditionalGeneration.from_pretrained(whisper_dir, dtype=torch.float32).eval()


def test_the_loss_of_whisper_is_its_own(whisper: Any, features: torch.Tensor) -> None:
    """Its own transcript as labels: the loss is small, and large where labels are shifted by one."""
    prompt = torch.tensor([[50258, 50259, 50359, 50363]])  # start, English, transcribe, no timestamps
    with torch.no_grad():
        said = whisper.generate(features, decoder_input_ids=prompt, max_new_tokens=12, do_sample=False)
        labels = torch.cat([prompt[:, 1:], said[:, -8:]], 1)
        batch = {"input_features": features, "labels": labels}
        own = whisper(**batch).loss.item()
        half = copy.deepcopy(whisper).half()
        mine = half(input_features=features.half(), labels=labels).loss.item()
    proof = hfpatch.verify(half, {**batch, "input_features": features.half()}, runs="as it is")
    print(f"\nown loss {own:.4f}\n{proof}")
    assert proof["as it is"].loss == pytest.approx(mine, abs=0)
    assert proof.reference.loss == pytest.approx(own, rel=2e-2)  # the weights are those rounded to float16
    assert proof["as it is"].kl < 1e-3


class Speech(nn.Module):
    """Whisper's encoder -> LayerNorm -> projector -> Gemma, with casts by hand, as such models are written."""

    def __init__(self, encoder: Any, llm: Any) -> None:
        super().__init__()
        width = encoder.config.d_model
        self.encoder = encoder
        self.ln_speech = nn.LayerNorm(width)
        self.speech_proj = nn.Linear(width, llm.config.hidden_size)
        self.llm = llm

    def forward(self, features: torch.Tensor, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        heard = self.encoder(features.half()).last_hidden_state[:, :8].float()
        text = self.llm.get_input_embeddings()(input_ids)
        embeds = torch.cat([self.speech_proj(self.ln_speech(heard)).half(), text], 1)
        if labels is not None:
            labels = torch.cat([labels.new_full((len(labels), 8), -100), labels], 1)
        return self.llm(inputs_embeds=embeds, labels=labels)


def test_a_speech_llm_that_casts_by_hand(whisper: Any, features: torch.Tensor, gemma_dir: Path) -> None:
    """In float16, stock it is NaN; every row but stock float16 runs, and the loss is the model's own."""
    encoder = copy.deepcopy(whisper.model.encoder).half()
    encoder.config.max_source_positions = FRAMES
    encoder.embed_positions = nn.Embedding.from_pretrained(encoder.embed_positions.weight[:FRAMES].detach())
    llm = AutoModelForCausalLM.from_pretrained(gemma_dir, dtype=torch.float16)
    ids = AutoTokenizer.from_pretrained(gemma_dir)("The boats came back.", return_tensors="pt")["input_ids"]
    torch.manual_seed(0)
    model = Speech(encoder, llm).eval()
    batch = {"features": features[:, :, : 2 * FRAMES], "input_ids": ids, "labels": ids}
    fix = hfpatch.apply(model, verbose=False)
    with torch.no_grad():
        own = model(**batch).loss.item()
    proof = fix.verify(batch, runs=["before", "after", "bfloat16 weights", "float32 weights, float16 autocast"])
    print(f"\n{proof}")
    assert not proof["before"].finite
    assert proof["after"].finite
    assert proof["after"].loss == own
    assert proof["after"].loss == pytest.approx(proof.reference.loss, abs=0.02)
    assert proof["after"].kl < proof["bfloat16 weights"].kl
    assert proof["float32 weights, float16 autocast"].finite
    assert any("the model's own casts stayed" in note for note in proof.notes)
    assert any(Path(__file__).name in note for note in proof.notes)


def test_gemma_loaded_and_cast(gemma_dir: Path, gemma_tokens: dict[str, torch.Tensor]) -> None:
    """A checkpoint cast by hand has rounded tables, one loaded in the dtype has not; verify sees both.

    Which of the two is nearer to float32 is chance on Gemma: over 32 to 512 tokens their KL is within 10 % of
    each other, in either order.
    """
    batch = {k: v[:, :32] for k, v in gemma_tokens.items()} | {"labels": gemma_tokens["input_ids"][:, :32]}
    load = AutoModelForCausalLM.from_pretrained
    loaded, cast = load(gemma_dir, dtype=torch.bfloat16), load(gemma_dir, dtype=torch.float32).bfloat16()
    runs = "as it is"
    right, wrong = (
        hfpatch.verify(loaded, batch, runs=runs),
        hfpatch.verify(cast, batch, runs=[runs, "as loaded with dtype="]),
    )
    print(f"\n{right}\n{wrong}")
    assert wrong.reference.loss == right.reference.loss
    assert wrong["as loaded with dtype="].kl == right[runs].kl
    assert wrong["as loaded with dtype="].loss == right[runs].loss
    assert wrong[runs].kl != right[runs].kl
    assert wrong[runs].loss != right[runs].loss
