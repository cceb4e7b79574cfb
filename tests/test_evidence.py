"""benchmarks/evidence.py: what its page says of figures, and the memory that it counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hfpatch.testing import tiny_model
from tests.conftest import ROOT, load_script
from tests.real.inputs import keep_rows


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return load_script("benchmarks/evidence.py")


def row(way: str, kl: float, *, size: float = 100.0, seconds: float = 1.0, equal: bool = True) -> dict[str, Any]:
    gone = math.isnan(kl)
    return {
        "way": way, "loss": kl, "KL": kl, "text equal": equal and not gone, "gradient error": kl, "loss scale": 1,
        "forward s": seconds, "step s": seconds, "forward MiB": size, "step MiB": size, "finite": not gone,
    }  # fmt: skip


FLOAT32 = row("float32", 0.0, size=200)
BFLOAT16 = row("bfloat16", 1e-3)
AUTOCAST = row("float32, float16 autocast", 1e-5, size=250, seconds=0.5)


def test_a_model_that_is_nan_stock(evidence: Any) -> None:
    rows = [
        FLOAT32,
        row("float16, stock", float("nan")),
        row("float16, hfpatch.apply", 1.2e-5),
        row("bfloat16", 1e-3, equal=False),
        AUTOCAST,
    ]
    said = evidence.verdict(rows, "KL", "text equal")
    assert said["best to run"] == said["best to train"] == "float16, hfpatch.apply"  # as exact, and leaner
    assert said["error, patched / stock"] is None
    assert said["error, bfloat16 / patched"] == pytest.approx(1e-3 / 1.2e-5)
    assert evidence.troubles([{"model": "Gemma", **said}]) == [
        "Gemma, float16, stock: not finite",
        "Gemma, bfloat16: the greedy answer is not float32's",
    ]


def test_a_healthy_model_that_the_patches_make_worse(evidence: Any) -> None:
    rows = [FLOAT32, row("float16, stock", 1e-5), row("float16, hfpatch.apply", 3e-5), BFLOAT16, AUTOCAST]
    said = evidence.verdict(rows, "KL", "text equal")
    assert said["best to run"] == "float16, stock"
    assert evidence.troubles([{"model": "Qwen", **said}]) == [
        "Qwen: healthy in float16, and patched the error is 3 times stock's",
        "Qwen: healthy in float16, and patched the gradient error is 3 times stock's",
    ]


def test_nothing_applied(evidence: Any) -> None:
    said = evidence.verdict([FLOAT32, row("float16, stock", 1e-5), BFLOAT16, AUTOCAST], "KL", "text equal")
    assert said["error, patched / stock"] == 1
    assert not evidence.troubles([{"model": "Whisper", **said}])


def test_the_faster_of_two_that_are_as_exact_and_as_lean(evidence: Any) -> None:
    rows = [FLOAT32, row("a", 1e-5, size=100, seconds=2), row("b", 1.4e-5, size=104), row("c", 1.6e-5, seconds=0.1)]
    assert evidence.best(rows, "KL", "forward MiB", "forward s") == "b"
    assert evidence.best([*rows, row("d", 1.3e-5, seconds=1.04)], "KL", "forward MiB", "forward s") == "d"
    assert evidence.best([FLOAT32, row("a", float("nan"))], "KL", "forward MiB", "forward s") is None


def test_memory_on_a_cpu_is_that_of_the_tensors_alive_at_once(evidence: Any) -> None:
    def body() -> int:
        kept = torch.zeros(1000)
        for _ in range(3):
            torch.zeros(2000)  # gone at once
        return len(kept)

    assert evidence.memory(torch.device("cpu"), body) == (12_000, 1000)


@pytest.mark.parametrize("tied", [True, False])
def test_a_cut_vocabulary_leaves_the_logits_of_its_words(tied: bool) -> None:
    model: Any = tiny_model("qwen2", vocab_size=3000, tie_word_embeddings=tied)
    ids = torch.tensor([[2999, 7, 1500, 7]])
    with torch.no_grad():
        whole = model(input_ids=ids).logits[..., ids.unique()]
        new = keep_rows(model, ids, 64)
        cut = model(input_ids=new).logits[..., new.unique()]
    assert model.get_input_embeddings().num_embeddings == 64
    assert torch.allclose(whole, cut, atol=1e-6)
