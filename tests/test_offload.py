"""Case 52: a model that accelerate offloads, to memory or disk, is patched as one that is whole, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from peft import LoraConfig, get_peft_model
from torch import nn

import hfpatch
from hfpatch.errors import RefusedError
from hfpatch.lab.composites_modulation import modulated
from hfpatch.lab.tiny import SpeechLLM, tiny_model
from tests.sampling import first_quick

IDS = torch.arange(24).reshape(2, 12)


def in_part(model: nn.Module, folder: str) -> None:
    """Every second layer, and each part beside the layers, on disk; the rest stays in memory."""
    paths = [p for p, m in model.named_modules() if isinstance(m, nn.ModuleList) and p.endswith(("layers", ".h"))]
    places: dict[str, str] = {}

    def place(path: str, module: nn.Module) -> None:
        inner = [p for p in paths if p == path or p.startswith(f"{path}." if path else "")]
        if not inner:
            places[path] = "cpu" if path.endswith("embed_tokens") else "disk"
            return
        for name, child in module.named_children():
            at = f"{path}.{name}" if path else name
            if path in paths:
                places[at] = "disk" if int(name) % 2 else "cpu"
            else:
                place(at, child)

    place("", model)
    dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


OFFLOADS: dict[str, Callable[[nn.Module, str], Any]] = {
    "cpu": lambda model, _folder: cpu_offload(model, "cpu"),
    "disk": lambda model, folder: disk_offload(model, folder, "cpu"),
    "in part": in_part,
}


def lora() -> nn.Module:
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(tiny_model("llama"), config)


def sdpa() -> nn.Module:
    model = tiny_model("llama")
    model.set_attn_implementation("sdpa")
    return model


KEPT: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "gemma3_text": ("fp16-residual-overflow", lambda: tiny_model("gemma3_text").half()),
    "gpt2": ("fp16-residual-overflow", lambda: tiny_model("gpt2").half()),
    "eager": ("fp32-attention-logits", lambda: tiny_model("qwen2").half()),
    "sdpa": ("eager-attention", sdpa),
    "norm": ("eps-alignment", lambda: SpeechLLM(tiny_model("llama"))),
    "modulated": ("sigmoid-modulation", lambda: modulated(tiny_model("llama"))),
}


@pytest.fixture(params=first_quick(OFFLOADS))
def offload(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[nn.Module], nn.Module]:
    def run(model: nn.Module) -> nn.Module:
        away = copy.deepcopy(model)
        OFFLOADS[request.param](away, str(tmp_path / "away"))
        assert any(p.is_meta for p in away.parameters())
        return away

    return run


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        features = {"features": torch.ones(2, 3, 24)} if isinstance(model, SpeechLLM) else {}
        return model(input_ids=IDS, **features).logits


@pytest.mark.parametrize("name", KEPT)
def test_a_patched_model_computes_the_same_offloaded(name: str, offload: Any) -> None:
    patch, make = KEPT[name]
    model = make().eval()
    away, stock = offload(model), logits(model)
    assert torch.equal(logits(away), stock)
    hfpatch.apply(model, only=patch, verbose=False)
    fix = hfpatch.apply(away, only=patch, verbose=False)
    assert fix.edits
    want = logits(model)
    assert torch.equal(logits(away), want)
    assert torch.equal(logits(away), want)
    fix.revert()
    assert torch.equal(logits(away), stock)


def test_what_is_not_in_memory_proves_nothing(offload: Any) -> None:
    """Norms and modulations on meta are not taken for untrained: a bare apply leaves them."""
    away = offload(SpeechLLM(tiny_model("llama")))
    assert away.ln_speech.weight.is_meta
    assert [d.decided for d in hfpatch.plan(away).decisions if d.patch == "eps-alignment"] == ["opt-in"]
    away = offload(modulated(tiny_model("llama")))
    for edit in hfpatch.plan(away).edits:
        assert not any(p.is_meta for p in edit.module.parameters())


def modules(model: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(part)) for name, part in model.named_modules()]


@pytest.mark.parametrize("make", [lora, lambda: SpeechLLM(tiny_model("gemma3_text"))], ids=["adapter", "projector"])
def test_what_would_write_into_absent_weights_is_refused(make: Any, offload: Any) -> None:
    away = offload(make().eval())
    patch = "projection-init" if isinstance(away, SpeechLLM) else "lora-target-expansion"
    before, was = modules(away), logits(away)
    with pytest.raises(RefusedError, match="offloaded"):
        hfpatch.apply(away, only=patch, verbose=False)
    assert modules(away) == before
    assert not hfpatch.status(away)
    assert torch.equal(logits(away), was)
