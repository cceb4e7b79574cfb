"""Projectors before Gemma 3 270M, the real weights: outputs as large as the embeddings that the model sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hfpatch.patches.shared import projection_init
from torch import nn
from transformers import AutoModelForCausalLM

import hfpatch
from hfpatch.lab.tiny import SpeechLLM
from hfpatch.model.projector.untouched import untouched

pytestmark = pytest.mark.real

QUOTED = " ".join(projection_init.__doc__.split())
"""What `hfpatch explain projection-init` says, in one line."""


def rms(values: torch.Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def test_sizes_of_embeddings_that_explain_quotes(gemma_dir: Path, smollm_dir: Path) -> None:
    for directory, where in (
        (gemma_dir, "Gemma 3 270M (which scales inside its embedding module)"),
        (smollm_dir, "SmolLM2 135M"),
    ):
        llm: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        with torch.no_grad():
            size = rms(hfpatch.embed_tokens(llm)(torch.arange(llm.config.vocab_size)))
        assert f"{size:.2f} in {where}" in QUOTED


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layers", [1, 2])
def test_rms_of_the_projected_features(layers: int, dtype: torch.dtype, gemma_dir: Path) -> None:
    torch.manual_seed(0)
    llm: Any = AutoModelForCausalLM.from_pretrained(gemma_dir, dtype=dtype)
    model = SpeechLLM(llm, width=384)
    if layers == 2:
        model.speech_proj = nn.Sequential(nn.Linear(384, 1024), nn.GELU(), nn.Linear(1024, 640))
    last = model.speech_proj if layers == 1 else model.speech_proj[2]
    features = torch.randn(4096, 384, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        text = rms(hfpatch.embed_tokens(model)(torch.arange(llm.config.vocab_size)))
        before = rms(model.speech_proj(features))
        fix = hfpatch.apply(model, only="projection-init", verbose=False)
        after = rms(model.speech_proj(features))
    raw = rms(llm.get_input_embeddings().weight.detach())
    assert text == pytest.approx(raw * 640**0.5, rel=0.01)  # Gemma scales inside the module
    print(f"\nRMS: embeddings as seen {text:.4f} (weights {raw:.4f}), projector before {before:.4f}, after {after:.4f}")
    print(f"{fix.edits[0].after}")
    assert after == pytest.approx(text, rel=0.03)
    assert f"{abs(after / text - 1):.1%}".replace("%", " %") in QUOTED
    fix.revert()
    assert untouched(last)
