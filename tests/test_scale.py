"""Models that no machine here holds, on meta; 1,000 shards; thousands of tensors: calls and bytes are counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig, LlamaForCausalLM

import hfpatch
from hfpatch.model.source import build_on_meta
from hfpatch.patching.manifest.file import read
from hfpatch.scanning.layout import total_bytes
from tests.counting import longest_silence

ROOT = Path(__file__).parent.parent
STREAM = "fp16-residual-overflow"


def llama(layers: int) -> Any:
    """The shape of Llama 3.1 405B, which has 126 layers."""
    return LlamaConfig(
        hidden_size=16384, intermediate_size=53248, num_attention_heads=128, num_key_value_heads=8, vocab_size=128256,
        num_hidden_layers=layers, tie_word_embeddings=False, dtype="float16",
    )  # fmt: skip


def deepseek(layers: int) -> Any:
    """DeepSeek-V3, whose 61 layers and 256 experts are the defaults of its config."""
    return DeepseekV3Config(num_hidden_layers=layers, dtype="float16")


SHAPES: dict[str, tuple[Callable[[int], Any], int, float]] = {
    "llama": (llama, 126, 405e9),
    "deepseek_v3": (deepseek, 61, 671e9),
}
"""A config by its number of layers, the real number, and the parameters that it then has."""


def stands(model: Any) -> Any:
    """Each module's attributes, tensors and hooks, by identity: no values are there to compare."""
    return [
        (path, {k: id(v) for k, v in vars(m).items() if k[0] != "_"}, [id(p) for p in (*m._parameters.values(),)],
         len(m._forward_hooks), len(m._forward_pre_hooks), "_hfpatch" in vars(m))
        for path, m in model.named_modules()
    ]  # fmt: skip


def calls(action: Callable[[], object]) -> int:
    """Run an action, and return how many functions of Python it called."""
    count = 0

    def counted(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    was = sys.getprofile()
    sys.setprofile(counted)
    try:
        action()
    finally:
        sys.setprofile(was)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_whole_life_on_meta(shape: str) -> None:
    config, layers, size = SHAPES[shape]
    model = build_on_meta(config(layers))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(size, rel=0.01)
    before = stands(model)
    info = hfpatch.inspect(model)
    assert info.architecture == shape
    assert sum(stack.layers for stack in info.stacks) == layers
    fix = hfpatch.apply(model, verbose=False)
    edits = [e for d in fix.plan.of("applied") if d.patch == STREAM for e in d.edits]
    assert len(edits) >= 2 * layers
    assert {e.state.word for e in fix.status().edits} == {"here"}
    assert all(p.is_meta for p in model.parameters())
    fix.revert()
    assert stands(model) == before


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "few"), [("llama", 100), ("deepseek_v3", 12)])
def test_the_work_grows_as_the_number_of_layers(shape: str, few: int) -> None:
    """Four times the layers: at most five times the calls, of each step."""
    config = SHAPES[shape][0]
    grown: dict[str, list[int]] = {}
    for layers in (few, 4 * few):
        model = build_on_meta(config(layers))
        hfpatch.plan(model)  # caches
        for name, step in (
            ("inspect", lambda m=model: hfpatch.inspect(m)),
            ("plan", lambda m=model: hfpatch.plan(m)),
            ("apply", lambda m=model: hfpatch.apply(m, verbose=False)),
            ("status", lambda m=model: hfpatch.status(m)),
            ("revert", lambda m=model: hfpatch.revert(m)),
        ):
            grown.setdefault(name, []).append(calls(step))
    assert {name: counts for name, counts in grown.items() if counts[1] > 5 * counts[0]} == {}
    assert all(counts[1] > counts[0] for counts in grown.values()), grown  # layers are looked at


def narrow(layers: int) -> Any:
    """Many layers, of nearly nothing."""
    return LlamaConfig(
        hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=2, vocab_size=8,
        num_hidden_layers=layers, dtype="float16",
    )  # fmt: skip


@pytest.mark.slow
def test_a_manifest_grows_as_the_number_of_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the layers: at most four times the calls; to read it, a few for each value; one state dict each."""
    asked: list[str] = []
    states = LlamaForCausalLM.state_dict

    def counted(model: Any, *args: Any, **words: Any) -> Any:
        asked.append("a state dict")
        return states(model, *args, **words)

    monkeypatch.setattr(LlamaForCausalLM, "state_dict", counted)
    grown: dict[str, list[int]] = {}
    for layers in (30, 120):
        fix = hfpatch.apply(LlamaForCausalLM(narrow(layers)).half(), verbose=False)
        fix.save(tmp_path)
        asked.clear()
        grown.setdefault("save", []).append(calls(lambda fix=fix: fix.save(tmp_path)))
        grown.setdefault("replay", []).append(
            calls(lambda fix=fix: hfpatch.apply(fix.model, manifest=tmp_path, verbose=False))
        )
        assert len(asked) == 2
        assert calls(lambda: read(tmp_path)) < 1000 * layers
    assert {name: counts for name, counts in grown.items() if counts[1] > 4.1 * counts[0]} == {}


def shards(folder: Path, count: int, wide: int) -> None:
    """A checkpoint of many shards of float16 values, with its index."""
    from safetensors.torch import save

    folder.mkdir()
    where: dict[str, str] = {}
    for at in range(count):
        name = f"model-{at + 1:05}-of-{count:05}.safetensors"
        (folder / name).write_bytes(save({f"layers.{at}.weight": torch.ones(wide, dtype=torch.float16)}))
        where[f"layers.{at}.weight"] = name
    index = {"metadata": {"total_size": count * wide * 2}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def peak(folder: Path, work: str) -> int:
    """Run a line of code in a new process that has scanned before; return the MiB that it held at most meanwhile."""
    script = """
        import pathlib, re, sys
        import hfpatch

        folder = pathlib.Path(sys.argv[1])
        hfpatch.scan(folder.parent / "small", processes=1)
        status, size = pathlib.Path("/proc/self/status"), lambda word: int(re.search(word + r":\\s+(\\d+)", text)[1])
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins at the present size
        text = status.read_text()
        before = size("VmRSS")
        exec(sys.argv[2])
        text = status.read_text()
        print((size("VmHWM") - before) // 1024)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(folder), work],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
def test_a_scan_of_a_thousand_shards_holds_one_at_a_time(tmp_path: Path) -> None:
    """1,000 shards of 128 KiB, 125 MiB together."""
    shards(tmp_path / "small", 2, 2**16)
    shards(tmp_path / "large", 1000, 2**16)
    assert peak(tmp_path / "large", "held = [p.read_bytes() for p in folder.iterdir()]") > 100  # it would be seen
    assert peak(tmp_path / "large", "assert hfpatch.scan(folder, processes=1).files == 1000") < 25


def tensors(folder: Path, count: int, files: int) -> Path:
    """A llama of 2 layers whose files hold many tensors of 4 values, of which it has none."""
    from safetensors.torch import save

    folder.mkdir()
    LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=8,
                architectures=["LlamaForCausalLM"]).save_pretrained(folder)  # fmt: skip
    one = torch.ones(4, dtype=torch.float16)
    where: dict[str, str] = {}
    for at in range(files):
        held = {f"model.layers.{i // 9}.part.{i % 9}.weight": one.clone() for i in range(at, count, files)}
        name = f"model-{at + 1:05}-of-{files:05}.safetensors" if files > 1 else "model.safetensors"
        (folder / name).write_bytes(save(held))
        where |= dict.fromkeys(held, name)
    if files > 1:
        index = {"metadata": {"total_size": count * 8}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def adapter(folder: Path, layers: int) -> Path:
    """A LoRA adapter of so many layers, whose keys lack the beginning that PEFT gives them."""
    from safetensors.torch import save

    folder.mkdir()
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    halves = {"A": torch.ones(2, 8), "B": torch.zeros(8, 2)}
    held = {
        f"model.layers.{layer}.self_attn.{name}_proj.lora_{half}.weight": values.clone()
        for layer in range(layers)
        for name in "qv"
        for half, values in halves.items()
    }
    (folder / "adapter_model.safetensors").write_bytes(save(held))
    return folder


def shallow() -> Any:
    return LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=8)


@pytest.mark.slow
@pytest.mark.parametrize("files", [1, 20])
def test_the_work_grows_as_the_number_of_tensors(files: int, tmp_path: Path) -> None:
    """Four times the tensors: at most five times the calls of a scan, and not one more of a look at the config."""
    grown: dict[str, list[int]] = {"scan": [], "inspect": []}
    for count in (2000, 8000):
        place = tensors(tmp_path / str(count), count, files)
        assert not hfpatch.scan(place)
        hfpatch.inspect(str(place))
        grown["scan"].append(calls(lambda p=place: hfpatch.scan(p)))
        grown["inspect"].append(calls(lambda p=place: hfpatch.inspect(str(p))))
    few, many = grown["scan"]
    assert 2 * few < many < 5 * few
    assert abs(grown["inspect"][1] - grown["inspect"][0]) < 0.02 * grown["inspect"][0]


@pytest.mark.slow
def test_the_work_grows_as_the_tensors_of_an_adapter(tmp_path: Path) -> None:
    """Under other names: so the renaming is looked for too, and tried."""
    grown: list[int] = []
    for layers in (200, 800):
        place = adapter(tmp_path / str(layers), layers)
        renamed = [f for f in hfpatch.scan(place, model=shallow()).findings if f.kind == "renaming"]
        assert renamed[0].figures == {"landed": 8}
        grown.append(calls(lambda p=place: hfpatch.scan(p, model=shallow())))
    assert grown[0] < grown[1] < 5 * grown[0]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["one file", "20 shards", "an adapter"])
def test_signs_of_progress_come_often(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20,000 tensors at most a million calls apart, about half a second."""
    from hfpatch.scanning import adapter as adapters

    if what == "an adapter":
        place, model = adapter(tmp_path / "a", 5000), shallow()
        hfpatch.scan(adapter(tmp_path / "small", 2), model=model)  # imports
    else:
        place, model = tensors(tmp_path / "t", 20_000, 1 if what == "one file" else 20), None

    def scanned(sign: Callable[[object], None]) -> None:
        def patience(_: str, *, every: float) -> Callable[[str], None]:
            assert every <= 2
            return sign

        monkeypatch.setattr(adapters, "patience", patience)
        hfpatch.scan(place, model=model, progress=sign)

    longest, signs = longest_silence(scanned)
    assert longest < 50 * 20_000
    assert signs > 5


def test_progress_reaches_the_size_of_the_files(tmp_path: Path) -> None:
    place = tensors(tmp_path / "t", 60, 3)
    told: list[int] = []
    hfpatch.scan(place, progress=told.append)
    assert sum(told) == total_bytes(place)
