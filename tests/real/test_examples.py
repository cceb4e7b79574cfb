"""The examples on the real weights of Gemma 3 270M and SmolLM2 135M: from failing to right."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path

import pytest
import torch

from tests.conftest import load_script

pytestmark = pytest.mark.real


@pytest.mark.need(
    '`attn_implementation="eager"`',
    "one call",
    '`hfpatch.apply(model, include=["eager-attention"])`, which is refused in float16. Eager is not safer: in '
    'float16 it overflows where sdpa does not; `hfpatch.apply(model, include=["fp32-attention-logits"])` is what '
    "helps",
)
def test_logits_of_gemma(gemma_dir: Path) -> None:
    example = load_script("examples/fp32_logits.py")
    llm = example.language_model(str(gemma_dir), "--llm", "gemma3_text")
    assert llm.real
    ids = example.keep_rows(llm.model, llm.ids(tokens=16), 256)
    first = example.attention_errors(llm.model, ids)
    larger = copy.deepcopy(llm.model)
    example.grow(larger, example.LARGER)
    second = example.attention_errors(larger, ids)
    print(f"\n{first}\n{second}")
    assert first["eager", "bfloat16"] > 3 * first["sdpa", "bfloat16"]
    assert second["eager", "bfloat16"] > 50 * second["sdpa", "bfloat16"]
    assert math.isnan(second["eager", "float16"])
    for errors in (first, second):
        for dtype in ("bfloat16", "float16"):
            assert errors["fp32 logits", dtype] < 1.3 * errors["sdpa", dtype]
    rows = {r[0]: r[1:] for r in example.stepped(larger, ids, torch.float16)}
    print(rows)
    assert rows["eager"] == ("nan",) * 4
    for name in ("sdpa", "fp32 logits"):
        loss, error, after, _ = map(float, rows[name])
        assert error < 0.02
        assert after < loss


def test_the_cascade_reads_real_embeddings(smollm_dir: Path) -> None:
    example = load_script("examples/cascade.py")
    embeds, labels = example.data(str(smollm_dir))
    assert embeds.shape[-1] == 576
    planted, cured = (example.train(embeds, labels, 40, decay) for decay in (example.PLANTED, 0.0))
    found = planted.trace.first_bad
    print(f"\n{found.sentence}\n{planted.trace.trend()}")
    assert (found.symptom, found.module) == ("growth", "stages.1.scale")
    assert all(map(math.isfinite, planted.norms))
    assert cured.trace.first_bad is None
    assert cured.norms[-1] < cured.norms[0] < planted.norms[-1] / 50
    assert cured.losses[-1] < planted.losses[-1]


def test_staged_training_of_a_real_encoder_and_language_model(
    smollm_dir: Path, whisper_dir: Path, tmp_path: Path
) -> None:
    example = load_script("examples/staged_multimodal.py")
    between = example.train(str(smollm_dir), str(whisper_dir), tmp_path, torch.bfloat16)
    assert {path.rpartition(".")[0] for path in re.findall(r"[\w.]+\.(?:weight|bias)", str(between))} == {
        "ln_speech",
        "speech_proj",
    }
    told = example.losses(tmp_path)
    for stage in example.STAGES:
        codes = {step: code for (name, step), (_, code) in told.items() if name == stage and code}
        assert codes == {example.NO_LABELS + 1: "no-labels", example.EXPLODING + 1: "explosion"}
    first, middle, last = (told[place][0] for place in (("projector", 1), ("projector", 10), ("lora", 10)))
    assert last < middle < first
