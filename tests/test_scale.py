"""Models that no machine here holds, on meta, and checkpoints of 1,000 shards: calls and bytes are counted."""

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
from transformers import DeepseekV3Config, LlamaConfig

import hfpatch
from hfpatch.model.source import build_on_meta

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
@pytest.mark.parametrize("shape", SHAPES)
def test_the_work_grows_as_the_number_of_layers(shape: str) -> None:
    """Four times the layers: at most five times the calls, of each step."""
    config = SHAPES[shape][0]
    grown: dict[str, list[int]] = {}
    for layers in (12, 48):
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
