"""The examples on tiny models: each shows a failure and its cure. Real weights: tests/real/test_examples.py."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch

from tests.conftest import ROOT, load_script


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


@pytest.mark.need(
    "a gradient that explodes while it is finite",
    "one call",
    "`hfpatch.trace(model)`: `trace.first_bad` names the operation, `trace.trend()` since when",
)
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


@pytest.fixture(scope="module")
def modulated() -> Any:
    return load_script("examples/modulated_smollm.py")


@pytest.fixture(scope="module")
def llm(loading: Any) -> Any:
    return loading.language_model("tiny", "--llm", "llama", num_hidden_layers=6)


@pytest.fixture(scope="module")
def staged() -> Any:
    return load_script("examples/staged_multimodal.py")


class TestModulation:
    def test_a_student_lacks_layers_and_is_wrapped(self, modulated: Any, llm: Any) -> None:
        model = modulated.student(llm.model, "adapter", every=3)
        assert len(model.model.layers) == model.config.num_hidden_layers == 5  # the last one stays
        assert all(type(layer) is modulated.Wrapped for layer in model.model.layers)
        assert len(llm.model.model.layers) == 6
        trained = {n.rsplit(".", 2)[-2] for n, p in model.named_parameters() if p.requires_grad}
        assert trained == {"a_proj", "b_add", "b_mult"}

    def test_all_start_as_the_teacher(self, modulated: Any, llm: Any) -> None:
        ids = llm.ids(tokens=8)
        wanted = modulated.hidden(llm.model, ids)
        for kind, far in (("published", 0.0), ("patched", 0.0), ("adapter", 1e-3), ("safe", 1e-3)):
            found = modulated.hidden(modulated.student(llm.model, kind, every=0).eval(), ids)
            assert ((found - wanted).norm() / wanted.norm()).item() <= far, kind

    def test_the_first_loss_is_the_same_to_the_last_bit(self, modulated: Any, llm: Any) -> None:
        runs = modulated.compare(llm, steps=2, tokens=8, every=3)
        assert runs["published"].losses[0] == runs["patched"].losses[0]
        assert all(run.losses[1] < run.losses[0] for run in runs.values())
        assert runs["safe"].factors.sub(1).abs().max() < 1e-3
        assert runs["patched"].factors.shape == (2, 5, 2)

    def test_factors_are_bounded(self, modulated: Any, llm: Any) -> None:
        """Every vector of B_mult at -40: a factor of 0 becomes one of 0.5."""
        ids = llm.ids(tokens=8)
        for kind, low, high in (("published", 0.0, 2.0), ("patched", 0.5, 1.5), ("adapter", 0.5, 1.5)):
            model = modulated.student(llm.model, kind, every=3)
            with torch.no_grad():
                for layer in model.model.layers:
                    layer.modulation.b_mult.weight.fill_(1e4)
            with modulated.Factors(model) as seen:
                modulated.hidden(model, ids)
            factors = torch.tensor(seen.found)
            assert factors.min() == pytest.approx(low, abs=1e-2)
            assert factors.max() == pytest.approx(high, abs=1e-2)


class TestSpeech:
    @pytest.mark.slow
    def test_nan_before_and_a_falling_loss_after(self) -> None:
        speech = load_script("examples/speech_gemma.py")
        given = speech.parts("tiny", "tiny")
        stock, patched, brain = (
            speech.train(speech.build(given, dtype, patched=fixed), given, steps=steps, size=2, rate=1e-3)
            for dtype, fixed, steps in (
                (torch.float16, False, 1),
                (torch.float16, True, 6),
                (torch.bfloat16, True, 6),
            )
        )
        assert math.isnan(stock[0])
        assert patched[-1] < patched[0]
        assert patched == pytest.approx(brain, rel=0.02)


class TestStages:
    """examples/staged_multimodal.py, in float16 with a GradScaler."""

    @pytest.mark.need(
        "encoders frozen, projectors trained",
        "some lines",
        "`requires_grad_`; `hfpatch.compare` between stages says which weights moved",
    )
    @pytest.mark.need(
        "checkpoints with the scaler's state, exact resume",
        "some lines",
        "`guard.state_dict()` beside those of optimizer, schedule and scaler; with the Trainer the callback does it",
    )
    @pytest.mark.slow
    def test_a_killed_run_goes_on_to_the_last_bit(self, staged: Any, tmp_path: Path) -> None:
        whole, killed = tmp_path / "whole", tmp_path / "killed"
        between = staged.train("tiny", "tiny", whole, torch.float16)
        told = staged.losses(whole)
        assert len(told) == 2 * staged.STEPS
        for stage in staged.STAGES:
            codes = {step: code for (name, step), (_, code) in told.items() if name == stage and code}
            assert codes == {staged.NO_LABELS + 1: "no-labels", staged.EXPLODING + 1: "overflow"}
            losses = [loss for (name, _), (loss, code) in told.items() if name == stage and code is None]
            assert losses[-1] < losses[0]
            best = torch.load(whole / stage / "best.pt", weights_only=True)
            assert best["best"] == min(losses)
        assert len(list((whole / "black_box").iterdir())) == 2, "an overflow under a scaler is ordinary, and not kept"
        assert "76 of 80 equal; 4 differ" in str(between), "stage 1 trains norm and projector, and nothing else"

        command = [sys.executable, ROOT / "examples" / "staged_multimodal.py", "--llm", "tiny", "--encoder", "tiny"]
        command += ["--dtype", "float16"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        for lines in (4, staged.STEPS + 3):  # in each stage
            running = subprocess.Popen(
                [*command, "--run", killed], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            log, end = killed / "log.jsonl", time.monotonic() + 300
            while not (log.is_file() and log.read_text().count("\n") >= lines):
                assert running.poll() is None
                assert time.monotonic() < end
                time.sleep(0.01)
            running.kill()
            assert running.wait() == -signal.SIGKILL
            assert len(staged.losses(killed)) < 2 * staged.STEPS
        staged.train("tiny", "tiny", killed, torch.float16)
        assert staged.losses(killed) == told
        for stage in staged.STAGES:
            ends = [torch.load(run / stage / "last.pt", weights_only=True) for run in (whole, killed)]
            for name, weight in ends[0]["weights"].items():
                assert torch.equal(weight, ends[1]["weights"][name]), name
            assert ends[0]["scaler"] == ends[1]["scaler"]
            assert repr(ends[0]["guard"]) == repr(ends[1]["guard"]), "a NaN is not equal to itself"

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_the_same_loop_without_a_scaler(self, dtype: torch.dtype, staged: Any, tmp_path: Path) -> None:
        staged.train("tiny", "tiny", tmp_path, dtype, steps=9)
        codes = {step: code for (_, step), (_, code) in staged.losses(tmp_path).items() if code}
        assert codes == {staged.NO_LABELS + 1: "no-labels", staged.EXPLODING + 1: "explosion"}
        norms = [row["norms"] for row in map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())]
        assert norms[0].keys() == {"norm", "projector"}
        assert norms[-1].keys() == {"norm", "projector", "attention", "mlp"}

    def test_the_schedule(self, staged: Any) -> None:
        factors = [staged.warm_up_and_cosine(step) for step in range(staged.STEPS + 1)]
        assert factors[staged.WARM_UP - 1] == factors[staged.WARM_UP] == 1.0
        assert factors[0] == pytest.approx(1 / staged.WARM_UP)
        assert factors[-1] == pytest.approx(0.0)
        assert factors[staged.WARM_UP :] == sorted(factors[staged.WARM_UP :], reverse=True)
