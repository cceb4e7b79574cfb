"""The speech LLM of examples/speech_gemma.py around the real Gemma 3 270M, in float16: before and after."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import hfpatch
from tests.conftest import load_script

pytestmark = pytest.mark.real

BY_HAND = {"fp16-residual-overflow", "eps-alignment", "projection-init"}


@pytest.fixture(scope="module")
def speech() -> Any:
    return load_script("examples/speech_gemma.py")


def built(speech: Any, gemma_dir: Path, train: str) -> tuple[Any, Any, Any]:
    model, ids, bos = speech.build(gemma_dir, rows=2048)
    return (speech.with_lora(model) if train == "lora" else model), ids, bos


@pytest.mark.parametrize(
    ("train", "include"), [("projector", None), ("lora", None), ("projector", "suggested")], ids=str
)
def test_nan_before_and_a_falling_loss_after(train: str, include: str | None, speech: Any, gemma_dir: Path) -> None:
    model, ids, bos = built(speech, gemma_dir, train)
    if include is None:
        stock = speech.train(model, ids, bos, steps=1, size=2)
        assert math.isnan(stock[0])
        model, ids, bos = built(speech, gemma_dir, train)
    fix = hfpatch.apply(model, include=include, verbose=False)
    assert {d.patch for d in fix.plan.of("applied")} >= BY_HAND
    assert model.ln_speech.eps == 1e-6
    losses = speech.train(model, ids, bos, steps=6, size=2)
    print(f"\n{train}, include={include}: {speech.show(losses)}")
    assert all(math.isfinite(loss) for loss in losses), losses
    assert sum(losses[-2:]) < 0.95 * sum(losses[:2]), losses
    assert all(p.isfinite().all() for p in model.parameters() if p.requires_grad)


def test_speech_is_as_large_as_text(speech: Any, gemma_dir: Path) -> None:
    model, ids, bos = built(speech, gemma_dir, "projector")
    inputs = speech.batch(ids, bos, size=8, seed=0)

    def ratio() -> float:
        with torch.no_grad():
            heard = model.speech_proj(model.ln_speech(model.encoder(inputs["features"]).last_hidden_state))
            text = hfpatch.embed_tokens(model)(inputs["input_ids"]).float()
        return float(heard.square().mean().sqrt() / text.square().mean().sqrt())

    stock = ratio()
    hfpatch.apply(model, verbose=False)
    print(f"\nRMS of speech / RMS of text: stock {stock:.3f}, patched {ratio():.3f}")
    assert 0.8 < ratio() < 1.25
