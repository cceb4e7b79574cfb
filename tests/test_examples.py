"""The examples on tiny models: each shows a failure and its cure. Real weights: tests/real/test_examples.py."""

from __future__ import annotations

import math
from typing import Any
from urllib.error import URLError

import pytest
import torch

from tests.conftest import load_script


@pytest.fixture(scope="module")
def loading() -> Any:
    return load_script("examples/loading.py")


@pytest.fixture(scope="module")
def logits() -> Any:
    return load_script("examples/fp32_logits.py")


@pytest.fixture(scope="module")
def cascade() -> Any:
    return load_script("examples/cascade.py")


class TestModels:
    @pytest.mark.parametrize("asked", ["/no/such/folder", "no-such/model", "tests/data"], ids=str)
    def test_what_cannot_be_read(
        self, asked: str, loading: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def unreachable(*_: Any, **__: Any) -> None:
            raise URLError("no network")

        monkeypatch.setattr(loading, "urlopen", unreachable)
        found = loading.language_model(asked, "--llm", "llama")
        assert not found.real
        assert found.model(found.ids(tokens=5)).logits.isfinite().all()
        (sentence,) = capsys.readouterr().err.splitlines()
        assert sentence.startswith(f"--llm {asked} cannot be read here (")
        assert "give --llm a folder that holds the weights" in sentence
        assert sentence.endswith("a tiny random model runs instead, as with --llm tiny")

    def test_tiny_is_not_an_error(self, loading: Any, capsys: pytest.CaptureFixture[str]) -> None:
        assert not loading.language_model("tiny", "--llm", "llama").real
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])  # a head of its own, and a tied one
    def test_rows_that_are_kept_compute_the_same(self, architecture: str, loading: Any) -> None:
        llm = loading.language_model("tiny", "--llm", architecture)
        ids = llm.ids(tokens=9)
        with torch.no_grad():
            stock = llm.model(ids).logits
            kept = loading.keep_rows(llm.model, ids, 12)
            found = llm.model(kept).logits
        assert found.shape[-1] == 12
        order = torch.unique(ids)
        torch.testing.assert_close(found[..., : len(order)], stock[..., order])


class TestFp32Logits:
    def test_attention_by_layer(self, logits: Any, loading: Any) -> None:
        llm = loading.language_model("tiny", "--llm", "gemma3_text")
        before = llm.model.config._attn_implementation
        logits.grow(llm.model, logits.LARGER)
        errors = logits.attention_errors(llm.model, llm.ids(tokens=12))
        assert llm.model.config._attn_implementation == before
        for dtype in ("bfloat16", "float16"):
            assert errors["eager", dtype] > 5 * errors["sdpa", dtype]
            assert errors["fp32 logits", dtype] < 1.3 * errors["sdpa", dtype]

    def test_nan_is_the_worst(self, logits: Any) -> None:
        assert math.isnan(logits.worst(math.nan, 1.0))
        assert math.isnan(logits.worst(1.0, math.nan))
        assert logits.worst(1.0, 2.0) == logits.worst(2.0, 1.0) == 2.0

    @pytest.mark.slow
    def test_an_indexer_chooses_as_in_float32(self, logits: Any) -> None:
        words = torch.randint(0, 64, (2, 48), generator=torch.Generator().manual_seed(0))
        deep = logits.tiny_model("deepseek_v32", index_topk=4)
        eager, sdpa, fixed = logits.indexer(words, deep, torch.bfloat16)
        for row in (eager, sdpa):
            for cell in (row[2], row[4]):
                same, of = map(int, cell.split(" of "))
                assert same < of
        same, of = fixed[2].split(" of ")
        assert same == of
        assert fixed[1:] == ("float32", fixed[2], "0.0e+00", fixed[2], "0.0e+00")

    @pytest.mark.slow
    def test_a_step(self, logits: Any, loading: Any) -> None:
        llm = loading.language_model("tiny", "--llm", "gemma3_text")
        rows = logits.stepped(llm.model, llm.ids(tokens=12), torch.bfloat16)
        assert [r[0] for r in rows] == ["float64", "float32", "eager", "sdpa", "fp32 logits"]
        errors = {r[0]: (float(r[2]), float(r[4])) for r in rows[1:]}
        assert max(errors["float32"]) < 1e-5
        assert all(1e-4 < e < 0.1 for name in ("eager", "sdpa", "fp32 logits") for e in errors[name])


@pytest.mark.slow
def test_cascade(cascade: Any) -> None:
    embeds, labels = cascade.data("tiny")
    planted, cured = (cascade.train(embeds, labels, 41, decay) for decay in (cascade.PLANTED, 0.0))
    found = planted.trace.first_bad
    assert (found.symptom, found.phase, found.module) == ("growth", "backward", "stages.1.scale")
    assert found.operation.startswith("division by values down to ")
    assert all(map(math.isfinite, [*planted.losses, *planted.norms])), "named while all is finite"
    assert "stages.1.output_proj.weight" in found.why
    (course,) = (c for c in planted.trace.trend().courses if c.path == "stages.1" and c.kind == "own code")
    assert course.doubling is not None
    assert 0 < course.doubling < 5
    assert course.factors[-1] > 1e5 * course.factors[0]
    assert planted.norms[-1] > 100 * planted.norms[0]
    assert planted.trace.largest_gradients(1)[0][0] == "stages.1.output_proj.weight"
    assert cured.trace.first_bad is None
    assert not [c for c in cured.trace.trend().courses if c.kind == "own code"]
    assert cured.norms[-1] < cured.norms[0]
    assert cured.losses[-1] < 0.7 * planted.losses[-1]
