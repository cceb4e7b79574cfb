"""The tracer on real weights: where Gemma 3 270M goes wrong in float16, and that float32 foretells it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hfpatch

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

pytestmark = pytest.mark.real

SHORT = 24


def load(path: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def forward(model: Any, tokens: dict[str, Tensor], **more: Any) -> Any:
    with hfpatch.trace(model, **more) as t, torch.no_grad():
        model(**{k: v[:, :SHORT] for k, v in tokens.items()})
    return t


@pytest.fixture(scope="module")
def gemma_healthy(gemma_dir: Path, gemma_tokens: dict[str, Tensor]) -> Any:
    return forward(load(gemma_dir, torch.float32), gemma_tokens)


def test_gemma_in_float16(gemma_dir: Path, gemma_tokens: dict[str, Tensor], gemma_healthy: Any) -> None:
    t = forward(load(gemma_dir, torch.float16), gemma_tokens, level="blocks")
    found = t.first_bad
    assert (found.phase, found.operation, found.module) == ("forward", "residual add", "model.layers.7")
    assert found.symptom == "residual-overflow"
    assert "hfpatch.apply(model, only=['fp16-residual-overflow'])" in " ".join(str(t.report()).split())
    assert gemma_healthy.first_bad is None
    foretold = gemma_healthy.headroom("float16").overflows
    assert (foretold[0].module, foretold[0].tensor) == ("model.layers.7", "output")


def test_gemma_in_bfloat16_has_room(gemma_healthy: Any) -> None:
    assert gemma_healthy.headroom("bfloat16").overflows == ()


def test_smollm_is_not_alarmed_about(smollm_dir: Path, smollm_tokens: dict[str, Tensor]) -> None:
    model = load(smollm_dir, torch.float32)
    t = forward(model, smollm_tokens)
    assert t.first_bad is None
    assert t.intentional == []
    assert t.headroom("float16").overflows == ()
    model = load(smollm_dir, torch.float16)
    assert forward(model, smollm_tokens, level="blocks").first_bad is None
    cast = forward(load(smollm_dir, torch.float32).half(), smollm_tokens, level="blocks")
    assert [f.symptom for f in cast.findings] == ["cast-buffer"]


def test_smollm_trained_with_a_bad_batch(smollm_dir: Path, smollm_tokens: dict[str, Tensor]) -> None:
    """LoRA, one healthy step and one in which an adapter has learned a NaN."""
    from peft import get_peft_model

    model = get_peft_model(load(smollm_dir, torch.float32), hfpatch.lora_config(load(smollm_dir, torch.float32), r=4))
    model.train()
    batch = {k: v[:, :16] for k, v in smollm_tokens.items()}
    adapter = dict(model.named_parameters())["base_model.model.model.layers.11.mlp.up_proj.lora_B.default.weight"]
    with hfpatch.trace(model, level="blocks") as t:
        model(**batch, labels=batch["input_ids"]).loss.backward()
        with torch.no_grad():
            adapter[0, 0] = float("nan")
        model(**batch, labels=batch["input_ids"]).loss.backward()
    (found,) = t.findings
    assert (found.step, found.phase, found.symptom) == (1, "weights", "bad-weight")
    assert found.module == "base_model.model.model.layers.11.mlp.up_proj.lora_B.default"
    assert t.steps[0].of("gradients")
