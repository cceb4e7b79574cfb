"""benchmarks/evidence.py on real weights: what it prints of SmolLM2 is what `verify` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hfpatch
from tests.conftest import ROOT, load_script

pytestmark = pytest.mark.real


def test_smollm_is_measured_as_verify_measures_it(smollm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    evidence: Any = load_script("benchmarks/evidence.py")
    subject = evidence.Subject("SmolLM2", "smollm2-135m", torch.device("cpu"), tokens=16, step_tokens=4)
    found = evidence.measured(subject, turns=1)
    rows = {row["way"]: row for row in found["rows"]}
    model = AutoModelForCausalLM.from_pretrained(smollm_dir, dtype=torch.float32)
    proof = hfpatch.verify(model, subject.batch(model).inputs)
    same = {
        "float16, stock": "float16 weights",
        "bfloat16": "bfloat16 weights",
        "float32, float16 autocast": "float32 weights, float16 autocast",
    }
    for way, name in same.items():
        assert rows[way]["KL"] == pytest.approx(proof[name].kl, rel=0.05), way
        assert rows[way]["loss"] == pytest.approx(proof[name].loss, rel=1e-3), way
    assert rows["float32"]["KL"] == rows["float32"]["gradient error"] == 0
    assert rows["float16, hfpatch.apply"]["gradient error"] < rows["bfloat16"]["gradient error"]
    assert rows["float16, hfpatch.apply"]["forward MiB"] < 0.6 * rows["float32"]["forward MiB"]
    assert rows["float16, hfpatch.apply"]["text equal"]
    assert found["error, bfloat16 / patched"] > 10
