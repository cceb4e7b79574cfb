"""SmolLM2 135M, the real weights: a Llama whose stream fits float16; the patch must not harm it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hfpatch

pytestmark = pytest.mark.real


@pytest.fixture(scope="session")
def master(smollm_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm_dir, dtype=torch.float32).eval()


def test_patched_is_nearer_to_float32_than_stock(master: Any, smollm_tokens: dict[str, torch.Tensor]) -> None:
    fix = hfpatch.apply(copy.deepcopy(master).half(), verbose=False)
    proof = fix.verify(smollm_tokens)
    print(f"\n{proof}")
    assert proof["before"].finite
    assert proof["after"].kl < proof["before"].kl
    assert proof["after"].kl <= proof["bfloat16 weights"].kl / 30
    assert proof["after"].top1 > 0.99


def test_the_answer_is_paris(master: Any, smollm_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm_dir)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    batch = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = copy.deepcopy(master).half()
    hfpatch.apply(model, verbose=False)
    out = model.generate(**batch, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, batch["input_ids"].shape[1] :])


def test_inspect_and_plan_from_the_directory(smollm_dir: Path) -> None:
    info = hfpatch.inspect(smollm_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm_dir)
    assert info.to_dict()["parameters"] == sum(p.numel() for p in model.parameters())
