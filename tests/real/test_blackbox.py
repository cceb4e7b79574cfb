"""The black box on real weights: what it records in a training, `hfpatch replay` reproduces as a process of its own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM

import hfpatch as package
from hfpatch.blackbox import BlackBox
from hfpatch.guarding.guard import Guard
from tests.test_cli import hfpatch

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

pytestmark = pytest.mark.real

SHORT = 24


def skip(model: Any, box: Path, tokens: dict[str, Tensor]) -> Path:
    """Train on a short batch, which is skipped; its bundle."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    guard = Guard(model.train(), optimizer, black_box=BlackBox(box), verbose=False)
    batch = {name: tensor[:, :SHORT] for name, tensor in tokens.items()}
    assert guard.step(model(**batch, labels=batch["input_ids"]).loss).skipped
    (bundle,) = box.iterdir()
    return bundle


def replayed(bundle: Path, model: Path) -> dict[str, Any]:
    done = hfpatch("replay", bundle, "--model", model, "--json")
    assert done.returncode == 1, done.stderr
    return json.loads(done.stdout)


def test_gemma_overflows_in_float16(gemma_dir: Path, gemma_tokens: dict[str, Tensor], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(gemma_dir, dtype=torch.float16)
    model.requires_grad_(False)
    model.model.norm.requires_grad_(True)
    found = replayed(skip(model, tmp_path, gemma_tokens), gemma_dir)
    assert found["reproduced"] is True
    finding = found["replayed"]["finding"]
    assert (finding["operation"], finding["module"]) == ("residual add", "model.layers.7")
    assert found["advice"] == ["tried on this call: finite: hfpatch.apply(model, only=['fp16-residual-overflow'])"]
    assert found["notes"] == []


def test_an_adapter_of_smollm_that_has_diverged(
    smollm_dir: Path, smollm_tokens: dict[str, Tensor], tmp_path: Path
) -> None:
    """In float32, under float16 autocast: what the adapter adds no longer fits."""
    base = AutoModelForCausalLM.from_pretrained(smollm_dir)
    model: Any = get_peft_model(base, package.lora_config(base, r=4))
    mlp = "base_model.model.model.layers.11.mlp"
    with torch.no_grad():
        model.get_submodule(f"{mlp}.up_proj.lora_B.default").weight.fill_(6e4)
    model.save_pretrained(tmp_path / "adapter")
    with torch.autocast("cpu", torch.float16):
        bundle = skip(model, tmp_path / "box", smollm_tokens)
    found = replayed(bundle, tmp_path / "adapter")
    assert found["reproduced"] is True
    assert found["replayed"]["finding"]["module"] == mlp
    assert found["replayed"]["finding"]["phase"] == "forward"
    assert found["notes"] == []
