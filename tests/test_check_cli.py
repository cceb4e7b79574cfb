"""`hfpatch check`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from hfpatch.lab.tiny import tiny_config
from tests.test_cli import bad, good, hfpatch


def saved(folder: Path, **overrides: Any) -> Path:
    """A directory with a config only."""
    config = tiny_config("llama", **overrides)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("half"), dtype="float16")


@pytest.fixture(scope="module")
def brain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("brain"), dtype="bfloat16")


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def found(*words: str | Path, code: int = 1) -> dict[str, Any]:
    done = hfpatch("check", *words, "--json")
    assert done.returncode == code, done.stderr
    assert not done.stderr
    return json.loads(done.stdout)


def test_help_imports_no_torch() -> None:
    script = (
        "import sys; sys.argv = ['hfpatch', 'check', '--help']\n"
        "from hfpatch.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not {'torch', 'transformers', 'peft', 'numpy', 'yaml'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--args" in done.stdout


def test_hazards_end_in_1(half: Path, brain: Path, tmp_path: Path) -> None:
    args = written(tmp_path, "args.yaml", "fp16: true\nadam_epsilon: 1e-8\nmax_grad_norm: 0\ndataset_name: mine\n")
    seen = found(half, "--args", args)
    assert {h["id"] for h in seen["hazards"]} >= {"fp16-parameters", "adam-eps-zero", "clipping-off"}
    assert not any(h["certain"] for h in seen["hazards"]), "a config says neither what trains nor how it is loaded"
    assert any("dataset_name" in r for r in seen["not_looked_at"])
    assert any(r.startswith("built from a config") for r in seen["remarks"])
    done = hfpatch("check", half, "--args", args)
    assert done.returncode == 1
    assert max(map(len, done.stdout.splitlines())) <= 80
    for word in (
        "LlamaForCausalLM, fp16 mixed precision",
        "fp16-parameters",
        "may happen",
        "model.embed_tokens.weight",
    ):
        assert word in done.stdout, word
    assert next(h["id"] for h in found(brain, "--args", args)["hazards"]) == "bf16-under-scaler"


def test_none_end_in_0(brain: Path, tmp_path: Path) -> None:
    args = written(tmp_path, "args.yml", "bf16: true\ngradient_accumulation_steps: 4\nlearning_rate: 2e-4\n")
    assert found(brain, "--args", args, code=0)["hazards"] == []
    assert "no hazards" in good("check", brain, "--args", args)
    assert "no training arguments" in good("check", brain / "config.json")


def test_what_a_trainer_writes_can_be_read(brain: Path, tmp_path: Path) -> None:
    made = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, fp16=True, max_grad_norm=0.5)
    args = written(tmp_path, "args.json", made.to_json_string())
    seen = found(brain, "--args", args)
    assert [h["id"] for h in seen["hazards"]] == ["bf16-under-scaler"]
    assert not any("no keys of TrainingArguments" in r for r in seen["remarks"])
    assert any("on the CPU accelerate ignores fp16=True" in r for r in seen["remarks"])


def test_bad_input_ends_in_2_with_a_sentence(brain: Path, tmp_path: Path) -> None:
    def args(name: str, text: str) -> tuple[Any, ...]:
        return "check", brain, "--args", written(tmp_path, name, text)

    assert "cannot be read (No such file" in bad("check", brain, "--args", tmp_path / "missing.yaml")
    assert "is not an ordinary file but a directory" in bad("check", brain, "--args", tmp_path)
    assert "not valid JSON (line 1, column 2" in bad(*args("a.json", "{fp16}"))
    assert "not valid YAML (line 2" in bad(*args("a.yaml", "fp16: true\n  : {"))
    assert "want a mapping of training arguments, got a list" in bad(*args("b.yaml", "- fp16"))
    assert "want a mapping of training arguments, got nothing" in bad(*args("c.yaml", ""))
    assert "fp16: want true or false, got 'maybe'" in bad(*args("d.yaml", "fp16: maybe"))
    (tmp_path / "training_args.bin").write_bytes(b"\x80\x04PK\xff\xfe")
    assert "a pickle, which is not read" in bad("check", brain, "--args", tmp_path / "training_args.bin")
    assert "no such directory or file" in bad("check", tmp_path / "nothing.json")
    assert "check: device: " in bad("check", brain, "--device", "nowhere")
