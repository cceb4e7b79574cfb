"""A speech LLM as people build it, in float16: NaN or drowned as it stands, trains after one bare apply."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.models.whisper.modeling_whisper import WhisperEncoder

import hfpatch
from hfpatch.lab.tiny import SpeechLLM, rescale, tiny_model
from tests.conftest import OVERFLOWING
from tests.fingerprint import fingerprint
from tests.sampling import first_quick
from tests.test_embed import WHISPER

BY_HAND = {"fp16-residual-overflow", "eps-alignment", "projection-init", "embed-token-resolver"}


class WithEncoder(nn.Module):
    """A frozen Whisper encoder before a `SpeechLLM`, and a loss on the text alone."""

    def __init__(self, llm: Any) -> None:
        super().__init__()
        self.encoder = WhisperEncoder(WHISPER).requires_grad_(requires_grad=False)
        self.speech = SpeechLLM(llm, width=32)

    def forward(self, input_ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        heard = self.encoder(features).last_hidden_state
        logits = self.speech(input_ids, features=heard).logits[:, heard.shape[1] : -1].float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten())


def composite(train: str) -> tuple[WithEncoder, dict[str, torch.Tensor]]:
    """The model with a frozen float16 language model whose stream overflows, and a batch that can be learned."""
    torch.manual_seed(0)
    llm = tiny_model("gemma3_text")
    rescale(llm, {}, OVERFLOWING)
    model = WithEncoder(llm.half().requires_grad_(requires_grad=False))
    if train == "lora":
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model.speech.llm = get_peft_model(llm, LoraConfig(r=4, target_modules=targets))
    ids = torch.randint(64, (4, 6), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": ids, "features": torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(2))}


def losses(model: nn.Module, batch: dict[str, torch.Tensor], steps: int) -> list[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    found: list[float] = []
    for _ in range(steps):
        loss = model(**batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("train", first_quick(["projector", "lora"]))
def test_nan_before_and_a_falling_loss_after(train: str) -> None:
    model, batch = composite(train)
    assert all(math.isnan(loss) for loss in losses(model, batch, 2))

    model, batch = composite(train)
    fix = hfpatch.apply(model, verbose=False)
    assert {e.effect for e in fix.plan.of("applied")} <= {"exact", "equivalent", "prepares"}
    assert {d.patch for d in fix.plan.of("applied")} >= BY_HAND
    assert model.speech.ln_speech.eps == 1e-6
    assert model.encoder.layer_norm.eps == 1e-5
    found = losses(model, batch, 40)
    assert all(math.isfinite(loss) for loss in found), found
    share = 0.9 if train == "lora" else 0.985  # a frozen random language model makes little of what it hears
    assert sum(found[-5:]) / 5 < share * found[0], found
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters() if p.requires_grad)


@pytest.mark.slow
def test_what_is_suggested_trains_too() -> None:
    model, batch = composite("lora")
    hfpatch.apply(model, include="suggested", verbose=False)
    found = losses(model, batch, 40)
    assert sum(found[-5:]) / 5 < 0.9 * found[0], found


def test_revert_takes_all_of_it_back_but_not_what_was_trained_elsewhere() -> None:
    model, batch = composite("projector")
    before = fingerprint(model)
    norm = model.speech.ln_speech.weight.clone()
    fix = hfpatch.apply(model, verbose=False)
    fix.revert()
    assert fingerprint(model) == before
    fix = hfpatch.apply(model, verbose=False)
    losses(model, batch, 3)
    assert not torch.equal(model.speech.ln_speech.weight, norm)


def test_features_beside_text_before_and_after() -> None:
    """The projected speech is many times the size of a token before, and as large as one after."""
    model, batch = composite("projector")

    def ratio() -> float:
        with torch.no_grad():
            heard = model.encoder(batch["features"]).last_hidden_state
            speech = model.speech.speech_proj(model.speech.ln_speech(heard))
            text = hfpatch.embed_tokens(model)(batch["input_ids"])
        return float(speech.float().square().mean().sqrt() / text.float().square().mean().sqrt())

    stock = ratio()
    hfpatch.apply(model, verbose=False)
    assert stock > 3
    assert 0.75 < ratio() < 1.33  # few rows, 32 x 32 draws
