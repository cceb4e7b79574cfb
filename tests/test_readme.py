"""What the README says is what a run gave, or what the code says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import hfpatch
from docs import patches, running
from hfpatch.lab.tiny import rescale
from hfpatch.patching import registry
from hfpatch.testing import example_inputs, tiny_model
from tests.conftest import OVERFLOWING, load_script
from tests.test_registry import CARD

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_figures_are_those_of_the_results() -> None:
    assert load_script("benchmarks/readme.py").filled(README) == README
    assert "NaN losses stock" in README


def test_the_table_of_patches_is_made_of_their_files() -> None:
    assert patches.filled(README) == README, "python -m docs.patches writes it"


def test_its_code_runs(tmp_path: Path) -> None:
    """The first block on a tiny Gemma 3 that overflows, trained by a Trainer; the second in a loop of one's own."""
    model = tiny_model("gemma3_text")
    rescale(model, {}, OVERFLOWING)
    model.half().save_pretrained(tmp_path / "model")
    batch = example_inputs(model)
    rows = [{name: value[0] for name, value in batch.items()}] * 2
    words: dict[str, Any] = {"report_to": [], "use_cpu": True, "max_steps": 1, "disable_tqdm": True}
    given = {
        "torch": torch, "hfpatch": hfpatch, "AutoModelForCausalLM": AutoModelForCausalLM,
        "get_peft_model": get_peft_model, "Trainer": Trainer, "path": str(tmp_path / "model"), "batch": batch,
        "args": TrainingArguments(output_dir=str(tmp_path / "out"), **words), "ds": rows,
        "model": tiny_model("llama"),
    }  # fmt: skip
    given["train_one_epoch"] = lambda: given["model"](**batch)
    printed = {
        heading: [said for _, said in running.run(blocks, given, page=str(ROOT / "README.md"))]
        for heading, blocks in running.sections(README).items()
    }
    assert "after" in printed["hfpatch"][0]
    assert "nothing" in printed["Where does it start?"][0].lower()


def test_what_apply_says(gemma: Any, capsys: Any) -> None:
    gemma.set_attn_implementation("sdpa")  # what from_pretrained gives
    hfpatch.apply(gemma)
    for line in capsys.readouterr().err.splitlines():
        assert line in README


def test_every_patch_and_public_function_is_named() -> None:
    named = set(re.findall(r"^\| \[`([a-z0-9-]+)`\]", README, flags=re.MULTILINE))
    assert CARD <= named <= set(registry.entries())
    functions = {n for n in hfpatch.__all__ if n[0].islower() and n not in ("errors", "nn", "testing")}
    assert functions <= set(re.findall(r"\w+", README))


def test_links() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target
