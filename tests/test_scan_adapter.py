"""`hfpatch.scan(folder, model=)`: the tensors of a saved adapter that land in a model, held against a real load."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import hfpatch
from hfpatch.cli import app
from hfpatch.errors import InputError
from hfpatch.testing import tiny_model

FILE = "adapter_model.safetensors"


def saved(folder: Path, architecture: str, **kwargs: Any) -> Path:
    torch.manual_seed(0)
    options: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"], **kwargs}
    config = LoraConfig(**options)
    peft = get_peft_model(tiny_model(architecture), config)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    peft.save_pretrained(str(folder))
    return folder


def rename(folder: Path, how: Callable[[str], str]) -> None:
    save_file({how(k): v for k, v in load_file(folder / FILE).items()}, folder / FILE, metadata={"format": "pt"})


def filled(folder: Path, architecture: str) -> tuple[int, int]:
    """The number of `lora_B` that a real load fills, and their number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = PeftModel.from_pretrained(tiny_model(architecture), str(folder))
    halves = [p for n, p in peft.named_parameters() if "lora_B" in n]
    return sum(bool(p.any()) for p in halves), len(halves)


OLD: list[tuple[str, Callable[[str], str]]] = [
    ("llama", lambda k: k),
    ("llama", lambda k: k.replace("base_model.model.model.", "base_model.model.")),
    ("llama", lambda k: k.removeprefix("base_model.model.")),
    ("llama", lambda k: f"module.{k}"),
    ("llama", lambda k: f"_orig_mod.{k}"),
    ("llama", lambda k: k.replace("lora_A", "lora_down").replace("lora_B", "lora_up")),
    ("qwen2_5_vl", lambda k: k.replace("model.language_model.layers", "model.layers")),
    ("gemma3", lambda k: k.replace("model.model.language_model.", "model.language_model.model.")),
]


@pytest.mark.parametrize(("architecture", "how"), OLD, ids=map(str, range(len(OLD))))
def test_what_lands_is_what_a_real_load_fills(tmp_path: Path, architecture: str, how: Callable[[str], str]) -> None:
    saved(tmp_path, architecture)
    rename(tmp_path, how)
    report = hfpatch.scan(tmp_path, model=tiny_model(architecture))
    note = next(n for n in report.notes if n.kind == "adapter")
    upper, every = filled(tmp_path, architecture)
    assert note.figures == {"wanted": 2 * every, "landed": 2 * upper}
    assert bool(report.findings) is (upper < every)
    if not report.findings:
        return
    (renaming,) = [f for f in report.findings if f.kind == "renaming"]
    assert renaming.figures["landed"] == 2 * every, renaming.text
    assert "tried" in renaming.text


def test_a_part_of_the_keys(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    rename(tmp_path, lambda k: k.replace("layers.1.", "layers.9."))
    report = hfpatch.scan(tmp_path, model=tiny_model("llama").config)
    kinds = [f.kind for f in report.findings]
    assert kinds[:2] == ["keys do not land", "parameters not filled"]
    assert report.findings[0].figures == {"count": 4}
    assert report.findings[1].figures == {"count": 4}
    assert "layers.9" in report.findings[0].text
    assert "layers.1." in report.findings[1].text


def test_an_adapter_of_another_model(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    wide = hfpatch.scan(tmp_path, model=tiny_model("llama", hidden_size=64))
    assert {f.kind for f in wide.findings} == {"wrong shape"}, wide
    other = hfpatch.scan(tmp_path, model=tiny_model("gpt2"))
    (finding,) = other.findings
    assert finding.kind == "adapter does not fit"
    assert "GPT2" in finding.text


def test_modules_that_were_saved_whole(tmp_path: Path) -> None:
    saved(tmp_path, "llama", modules_to_save=["lm_head"])
    assert not hfpatch.scan(tmp_path, model=tiny_model("llama"))
    rename(tmp_path, lambda k: k.replace("lm_head", "head"))
    assert hfpatch.scan(tmp_path, model=tiny_model("llama")).findings


def test_bad_adapters(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[: len(whole) // 2])
    assert {f.kind for f in hfpatch.scan(tmp_path, model=tiny_model("llama")).findings} == {"broken file"}
    (tmp_path / FILE).write_bytes(whole)
    config = tmp_path / "adapter_config.json"
    for text in ("[]", "{", '{"r": 2}', "[" * 100_000):
        config.write_text(text)
        with pytest.raises(InputError, match="adapter_config"):
            hfpatch.scan(tmp_path, model=tiny_model("llama"))
    config.write_text(json.dumps({"peft_type": "NO_SUCH", "target_modules": ["q_proj"]}))
    (finding,) = hfpatch.scan(tmp_path, model=tiny_model("llama")).findings
    assert finding.kind == "adapter does not fit"
    for model, wanted in ((torch.nn.Linear(2, 2), "want a transformers model"), (str(tmp_path / "nothing"), "nothing")):
        with pytest.raises(InputError, match=wanted):
            hfpatch.scan(tmp_path, model=model)
    config.unlink()
    with pytest.raises(InputError, match=r"adapter_config\.json"):
        hfpatch.scan(tmp_path, model=tiny_model("llama"))


def test_the_command(tmp_path: Path) -> None:
    adapter, model = saved(tmp_path / "adapter", "llama"), tmp_path / "model"
    tiny_model("llama").config.save_pretrained(model)
    run = CliRunner().invoke(app, ["scan", str(adapter), "--model", str(model)])
    assert run.exit_code == 0, run.output
    rename(adapter, lambda k: k.replace("base_model.model.model.", "base_model.model."))
    run = CliRunner().invoke(app, ["scan", str(adapter), "--model", str(model)])
    assert run.exit_code == 1
    assert "tried" in run.output
