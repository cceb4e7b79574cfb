"""doctor on Gemma 3 270M: its advice is what benchmarks/evidence.py measured on this text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM

import hfpatch
from tests.conftest import ROOT

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.real


def test_the_advice_is_what_the_benchmark_measured(gemma_dir: Path, gemma_tokens: dict[str, Tensor]) -> None:
    page = json.loads((ROOT / "benchmarks" / "results" / "evidence-cpu.json").read_text())
    measured = next(m for m in page["models"] if m["model"] == "Gemma 3 270M")
    model = AutoModelForCausalLM.from_pretrained(gemma_dir, dtype=torch.float32)
    found = hfpatch.doctor(model, batch={k: v[:, :40] for k, v in gemma_tokens.items()})
    assert found.best is not None
    assert found.best.way.name == measured["best to run"] == "float16, hfpatch.apply"
    assert [r.way.name for r in found.runs if not r.finite] == measured["not finite"] == ["float16, stock"]
    assert [d.patch for d in found.plan.of("applied")] == ["fp16-residual-overflow"]
    assert found.rooms[0].peak is not None
    assert found.rooms[0].peak.value > 65_504
    assert found.proof["after"].kl < 1e-4
    assert not found.hazards
