"""The speech LLM of examples/speech_gemma.py: real Whisper base and Gemma 3 270M, in float16, before and after."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import hfpatch
from tests.conftest import load_script

pytestmark = pytest.mark.real

BY_HAND = {"fp16-residual-overflow", "eps-alignment", "projection-init", "embed-token-resolver"}


@pytest.fixture(scope="module")
def speech() -> Any:
    return load_script("examples/speech_gemma.py")


@pytest.fixture(scope="module")
def given(speech: Any, gemma_dir: Path, whisper_dir: Path) -> Any:
    found = speech.parts(str(gemma_dir), str(whisper_dir))
    assert found.llm.real
    assert found.encoder.config.d_model == 512
    return found


@pytest.mark.need(
    "the norm's eps 1e-4 -> `rms_norm_eps`",
    "one call",
    "`hfpatch.apply(model)` (`eps-alignment`): the norm that was added, not the model's own. It gives parity, not "
    "stability: a smaller eps raises the largest gain",
)
def test_nan_before_and_a_falling_loss_after(speech: Any, given: Any) -> None:
    (stock,) = speech.train(speech.build(given, torch.float16, patched=False), given, steps=1, size=2)
    assert math.isnan(stock)
    model = speech.build(given, torch.float16, patched=True)
    assert {d.patch for d in hfpatch.plan(model).decisions if d.already} >= BY_HAND
    assert model.ln_speech.eps == 1e-6
    losses = speech.train(model, given, steps=5, size=2)
    brain = speech.train(speech.build(given, torch.bfloat16, patched=True), given, steps=5, size=2)
    print(f"\nfloat16 {losses}\nbfloat16 {brain}")
    assert all(map(math.isfinite, losses)), losses
    assert losses[-1] < 0.6 * losses[0], losses
    assert brain[-1] < 0.6 * brain[0], brain
    assert all(p.isfinite().all() for p in model.parameters() if p.requires_grad)
    assert losses[0] == pytest.approx(brain[0], rel=0.02)  # later ones are of weights that part by rounding


@pytest.mark.need(
    "projector init std 0.02, bias 0",
    "one call",
    "`hfpatch.apply(model)` (`projection-init`): the RMS of the model's own embeddings, and bias 0; "
    '`hfpatch.apply(model, options={"projection-init": {"std": 0.02}})` sets 0.02',
)
def test_speech_is_as_large_as_text(speech: Any, given: Any) -> None:
    model = speech.SpeechLLM(copy.deepcopy(given.llm.model).half(), copy.deepcopy(given.encoder))
    inputs = speech.batch(given, size=4, seed=0)

    def ratio() -> float:
        with torch.no_grad():
            heard = model.speech(inputs["features"])
            text = hfpatch.embed_tokens(model)(inputs["input_ids"]).float()
        return (heard.square().mean().sqrt() / text.square().mean().sqrt()).item()

    stock = ratio()
    hfpatch.apply(model, verbose=False)
    print(f"\nRMS of speech / RMS of text: stock {stock:.3f}, patched {ratio():.3f}")
    assert 0.8 < ratio() < 1.25


def test_words_sound_different(speech: Any, given: Any) -> None:
    with torch.no_grad():
        states = [
            given.encoder(speech.batch(given, size=1, seed=seed)["features"]).last_hidden_state for seed in (0, 1)
        ]
    assert ((states[0] - states[1]).norm() / states[0].norm()).item() > 0.1
