"""The whole loop as one call: what it says is what the other verbs say, and the model is as before."""

from __future__ import annotations

import copy
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfpatch
from hfpatch.doctoring import budget
from hfpatch.doctoring.ways import FLOAT32, WAYS, Run, Way, chosen, copied, held_memory
from hfpatch.errors import InputError
from hfpatch.lab.tiny import SpeechLLM, rescale
from hfpatch.report import Sheet
from hfpatch.report.document import anonymous, document
from hfpatch.testing import example_inputs, tiny_model
from tests.conftest import OVERFLOWING, Ran
from tests.fingerprint import fingerprint
from tests.test_trace_cli import save


def overflowing() -> Any:
    model = tiny_model("gemma3_text", pad_token_id=None)
    rescale(model, {}, OVERFLOWING)
    return model


@pytest.fixture(scope="module")
def examined() -> tuple[Any, dict[str, Any], hfpatch.Diagnosis]:
    model = overflowing()
    batch = example_inputs(model)
    before = fingerprint(model), torch.get_rng_state().tolist()
    found = hfpatch.doctor(model, batch=batch)
    assert (fingerprint(model), torch.get_rng_state().tolist()) == before, "nothing is left behind"
    return model, batch, found


def test_the_advice_is_what_was_measured(examined: Any) -> None:
    _, _, found = examined
    assert found.best.way.name in ("float16, hfpatch.apply", "float32, float16 autocast")
    ways = {r.way.name: r for r in found.runs}
    assert list(ways) == [w.name for w in WAYS]
    assert not ways["float16, stock"].finite
    assert "not finite: float16, stock" in found.advice
    assert ways["float32"].kl == 0
    assert 0 < ways["float16, hfpatch.apply"].kl < ways["bfloat16"].kl
    assert ways["float16, hfpatch.apply"].memory < 0.7 * ways["float32"].memory
    assert all(r.seconds > 0 for r in found.runs)


def test_it_says_what_the_other_verbs_say(examined: Any) -> None:
    model, batch, found = examined
    half = copied(model, torch.float16)
    plan = hfpatch.plan(half, batch=batch)
    assert [(d.patch, d.decided) for d in found.plan.decisions] == [(d.patch, d.decided) for d in plan.decisions]
    assert found.proof["before"].finite is False
    assert found.proof["after"].finite is True
    assert found.lifted.endswith("nothing is left")
    assert [r.path for r in found.rooms] == ["model.layers"]
    assert found.rooms[0].peak.value > 65_504
    assert found.hazards.ids == hfpatch.check(model, batch=batch).ids


def test_one_page(examined: Any) -> None:
    _, _, found = examined
    text = "\n\n".join(s.to_text(80) for s in found.sheets())
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 70
    assert lines[1].startswith("Run it in ")
    assert "hfpatch.apply(model, batch=batch)" in text or "torch.autocast('cpu'" in text
    json.dumps(found.to_dict(), allow_nan=False)


def test_the_html_is_self_contained(examined: Any, tmp_path: Path) -> None:
    _, _, found = examined
    found.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert not re.findall(r"(?:src|href|url)\s*[=(]", page)
    assert "prefers-color-scheme: dark" in page
    assert "default-src &#x27;none&#x27;" in page
    assert "fp16-residual-overflow" in page
    assert socket.gethostname() not in page
    assert str(Path.home()) not in page


def test_nobody_is_named_in_a_page() -> None:
    said = anonymous(
        f"/home/ann/secret/model.py:3 and C:\\Users\\ann\\x.bin with hf_abcdefghij on {socket.gethostname()}"
    )
    assert said.startswith("model.py:3 and x.bin with (token) on ")
    assert "ann" not in said.replace("(host)", "")
    assert anonymous("KL 1/2 and/or model.layers.3/x") == "KL 1/2 and/or model.layers.3/x"
    page = document("<b>", [Sheet("<i>", ("a",), (("<script>",),))])
    assert "<script>" not in page
    assert "<i>" not in page


@pytest.mark.parametrize(
    ("figures", "best"),
    [
        ({"a": (1.0, 10, 1.0), "b": (1.4, 5, 2.0)}, "b"),  # as good, and leaner
        ({"a": (1.0, 10, 1.0), "b": (1.6, 5, 0.1)}, "a"),  # worse
        ({"a": (1.0, 10, 2.0), "b": (1.2, 10, 1.0)}, "b"),  # as good, as lean, faster
        ({"a": (float("nan"), 1, 1.0)}, None),
    ],
)
def test_the_best_way(figures: dict[str, tuple[float, int, float]], best: str | None) -> None:
    runs = [Run(FLOAT32, None, 0.0, 1.0, 0.1, 1)]
    runs += [Run(Way(n, torch.float16), None, kl, 1.0, seconds, size) for n, (kl, size, seconds) in figures.items()]
    found = chosen(runs)
    assert (None if found is None else found.way.name) == best


def test_memory_is_that_of_tensors_alive_at_once() -> None:
    def body() -> torch.Tensor:
        a = torch.ones(1000)
        b = a + 1
        del a
        return (b * 2).view(10, 100)

    most, out = held_memory(torch.device("cpu"), body)
    assert out.shape == (10, 100)
    assert most == 8000


def test_a_copy_is_what_the_loader_leaves(tmp_path: Path) -> None:
    model = tiny_model("gemma3_text")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    found = hfpatch.compare(loaded, copied(model, torch.bfloat16), example_inputs(model))
    assert found.equal
    assert not found.facts


def test_a_healthy_composite() -> None:
    model = SpeechLLM(tiny_model("llama"))
    found = hfpatch.doctor(model, batch={"input_ids": torch.arange(24).reshape(2, 12)})
    assert found.best is not None
    assert all(r.finite for r in found.runs)
    assert not hfpatch.status(model).edits


def test_bad_input(tiny: Callable[[str], nn.Module]) -> None:
    model = tiny("llama")
    with pytest.raises(InputError, match="want a dict as batch="):
        hfpatch.doctor(model, batch=[1])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="on meta"):
        hfpatch.doctor(copy.deepcopy(model).to("meta"), batch={"input_ids": torch.ones(1, 4, dtype=torch.long)})


class TestCommand:
    def test_a_checkpoint(self, tmp_path: Path, here: Callable[..., Ran]) -> None:
        folder = save(overflowing(), tmp_path / "model")
        ran = here("doctor", folder, "--tokens", 12, "--html", tmp_path / "page.html", code=1)
        assert "loss-like-a-guess" in ran.text, "its weights are random"
        assert "Run it in" in ran.text
        assert max(map(len, ran.stdout.splitlines())) <= 80
        assert "doctor" in (tmp_path / "page.html").read_text()

    @pytest.mark.parametrize(
        ("case", "said"),
        [
            ("weights", "holds a config without weights"),
            ("code", "remote code"),
            ("text", "not UTF-8"),
            ("memory", "nothing was loaded"),
            ("html", "want a file in a directory that exists"),
            ("tokens", "a loss needs two"),
        ],
    )
    def test_said_before_anything_is_loaded(
        self, case: str, said: str, tmp_path: Path, here: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = save(tiny_model("llama"), tmp_path / "model")
        words: list[Any] = []
        if case == "weights":
            (folder / "model.safetensors").unlink()
        if case == "code":
            (folder / "evil.py").write_text("raise SystemExit('it ran')\n")
            names = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
            (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": names}))
        if case == "text":
            (tmp_path / "text").write_bytes("naïve".encode("latin-1"))
            words = ["--text", tmp_path / "text"]
        if case == "memory":
            (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 9 kB\n")
            monkeypatch.setattr(budget, "MEMINFO", tmp_path / "meminfo")
        if case == "html":
            words = ["--html", tmp_path / "missing" / "page.html"]
        if case == "tokens":
            words = ["--tokens", 1]
        monkeypatch.setattr("hfpatch.tracing.checkpoint._model", lambda *_a, **_k: pytest.fail("weights were loaded"))
        assert said in here("doctor", folder, *words, code=2).sentence
