"""`hfpatch replay`: bundles of a guarded training, run with checkpoints; as a real process where that matters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification, LlamaForCausalLM

import hfpatch as package
from hfpatch.blackbox import BlackBox, read_bundle
from hfpatch.guarding.guard import Guard
from hfpatch.lab.tiny import rescale, tiny_model
from tests.conftest import OVERFLOWING, Ran
from tests.test_cli import hfpatch

PATCH = "fp16-residual-overflow"
BERT = BertConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
APPLY = f"tried on this call: finite: hfpatch.apply(model, only=['{PATCH}'])"


def guard(model: Any, box: BlackBox, **options: Any) -> Guard:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    return Guard(model, optimizer, black_box=box, **{"verbose": False, "explode_at": None, **options})


def skipped(model: Any, box: Path, batch: dict[str, torch.Tensor], factor: float = 1.0, **options: Any) -> Path:
    """The bundle of a batch that is skipped."""
    held = set(box.glob("*"))
    assert guard(model, BlackBox(box, **options)).step(model(**batch).loss * factor).skipped
    (made,) = set(box.glob("step-*")) - held
    return made


def poisoned(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    inputs = model.get_input_embeddings()(ids).detach().clone()
    inputs[0, 3, 2] = float("nan")
    return {"inputs_embeds": inputs, "labels": ids}


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in float32, and the bundle of a run with it in float16."""
    folder = tmp_path_factory.mktemp("overflowing")
    model: Any = tiny_model("gemma3_text")
    rescale(model, {}, OVERFLOWING)
    model.save_pretrained(folder / "model")
    ids = (torch.arange(24).reshape(2, 12) * 7 + 3) % 64
    return folder / "model", skipped(model.half().train(), folder / "box", {"input_ids": ids, "labels": ids})


Replay = Callable[..., Ran]


@pytest.fixture
def replay(here: Callable[..., Ran]) -> Replay:
    """`replay(BUNDLE, MODEL, ..., code=0)`: the command line, run in this process; it ends with `code`."""
    return lambda bundle, model, *words, code=0: here("replay", bundle, "--model", model, *words, code=code)


@pytest.fixture
def bad(replay: Replay) -> Callable[..., str]:
    """`bad(BUNDLE, MODEL, ...)`: the one sentence it says before it ends with 2."""
    return lambda *words: replay(*words, code=2).sentence


def test_the_recorded_fault_is_reproduced(overflowing: tuple[Path, Path]) -> None:
    model, bundle = overflowing
    done = hfpatch("replay", bundle, "--model", model)
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(done.stdout.split())
    assert text.count("residual add in model.layers.1") == 2, "in the run, and here"
    assert "Reproduced: the same operation in the same module." in text
    assert "not the weights" not in text
    assert text.endswith(APPLY)


@pytest.mark.slow
def test_json(overflowing: tuple[Path, Path], replay: Replay) -> None:
    model, bundle = overflowing
    found = replay(bundle, model, "--json", code=1).figures
    assert set(found) == {
        "bundle", "model", "event", "recorded", "replayed", "reproduced", "patches", "notes", "advice",
    }  # fmt: skip
    assert found["reproduced"] is True
    assert found["recorded"]["finding"] == found["replayed"]["finding"]
    assert found["recorded"]["loss"] == "nan"
    assert found["advice"] == [APPLY]
    assert (found["patches"], found["notes"]) == ([], [])


def test_another_dtype_is_healthy_and_said(overflowing: tuple[Path, Path], replay: Replay) -> None:
    model, bundle = overflowing
    text = replay(bundle, model, "--dtype", "float32").text
    assert "Not reproduced: the recorded fault does not occur here." in text
    assert "The run's weights were float16, these are float32." in text
    assert "no operation goes wrong; the loss is" in text


def test_other_weights_are_told(overflowing: tuple[Path, Path], replay: Replay, tmp_path: Path) -> None:
    healthy: Any = tiny_model("gemma3_text")
    healthy.save_pretrained(tmp_path)
    assert "The weights differ from those of the run at that step." in replay(overflowing[1], tmp_path).text


def test_patches_of_the_run_are_applied(
    overflowing: tuple[Path, Path], replay: Replay, tmp_path: Path, ids: torch.Tensor
) -> None:
    folder, _ = overflowing
    model: Any = tiny_model("gemma3_text")
    rescale(model, {}, OVERFLOWING)
    model.half().train()
    package.apply(model, only=PATCH, verbose=False)
    bundle = skipped(model, tmp_path / "box", poisoned(model, ids))
    assert read_bundle(bundle).patches == (PATCH,)
    text = replay(bundle, folder, code=1).text
    assert f"Applied as in the run: {PATCH}." in text
    assert "Reproduced" in text
    assert "not the weights" not in text
    text = replay(bundle, folder, "--unpatched", code=1).text
    assert f"Not applied here, but in the run: {PATCH}." in text


def test_a_fault_of_the_backward_pass_needs_the_factor_of_the_loss(
    replay: Replay, tmp_path: Path, ids: torch.Tensor
) -> None:
    model: Any = tiny_model("llama").train()
    model.save_pretrained(tmp_path / "model")
    box = tmp_path / "box"
    watched = guard(model, BlackBox(box))
    with torch.autocast("cpu", torch.float16):
        loss = model(input_ids=ids, labels=ids).loss
    assert watched.step(loss * 2.0**30).skipped
    (bundle,) = box.glob("step-*")
    recorded = read_bundle(bundle).about
    assert recorded["call"]["autocast"] == {"cpu": "float16"}
    assert recorded["replay"]["factor"] == pytest.approx(2.0**30)
    assert recorded["replay"]["finding"]["phase"] == "backward"
    assert replay(bundle, tmp_path / "model", "--json", code=1).figures["reproduced"] is True


def test_an_adapter_is_put_on_its_base(replay: Replay, bad: Any, tmp_path: Path, ids: torch.Tensor) -> None:
    tiny: Any = tiny_model("llama")
    tiny.save_pretrained(tmp_path / "base")
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    model: Any = get_peft_model(base, LoraConfig(target_modules=["q_proj"], r=2, lora_dropout=0.3))
    model.train()
    model.save_pretrained(tmp_path / "adapter")
    bundle = skipped(model, tmp_path / "box", poisoned(model, ids))
    ran = replay(bundle, tmp_path / "adapter", "--json", code=1).figures
    assert (ran["reproduced"], ran["notes"]) == (True, [])
    config = tmp_path / "adapter" / "adapter_config.json"
    kept = json.loads(config.read_text())
    config.write_text(json.dumps({**kept, "base_model_name_or_path": None}))
    assert "write its directory into base_model_name_or_path" in bad(bundle, tmp_path / "adapter")
    config.write_text(json.dumps({**kept, "base_model_name_or_path": str(tmp_path / "gone")}))
    assert str(tmp_path / "gone") in bad(bundle, tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "adapter_model.bin")
    assert "pickled weights are never read" in bad(bundle, tmp_path / "adapter")


def test_an_encoder_without_a_tokenizer(replay: Replay, tmp_path: Path, ids: torch.Tensor) -> None:
    model = BertForSequenceClassification(BERT).train()
    model.save_pretrained(tmp_path / "model")
    batch = {**poisoned(model, ids), "labels": torch.tensor([0, 1])}
    assert "Reproduced" in replay(skipped(model, tmp_path / "box", batch), tmp_path / "model", code=1).text


def test_a_loss_that_was_spoiled_outside(replay: Replay, tmp_path: Path, ids: torch.Tensor) -> None:
    model: Any = tiny_model("llama").train()
    model.save_pretrained(tmp_path / "model")
    bundle = skipped(model, tmp_path / "box", {"input_ids": ids, "labels": ids}, factor=float("nan"))
    text = replay(bundle, tmp_path / "model").text
    assert "the cause is outside the model" in text
    assert "Nothing to reproduce: no fault was found in the run either." in text


class TestBadInput:
    def test_no_bundle(self, overflowing: tuple[Path, Path], bad: Any, tmp_path: Path) -> None:
        assert "no such directory; name a bundle" in bad(tmp_path / "gone", overflowing[0])

    def test_a_changed_bundle(self, overflowing: tuple[Path, Path], bad: Any, tmp_path: Path) -> None:
        copied = tmp_path / "bundle"
        copied.mkdir()
        for file in overflowing[1].iterdir():
            (copied / file.name).write_bytes(file.read_bytes()[:-1])
        before = {p.name: p.read_bytes() for p in copied.iterdir()}
        assert "truncated or changed" in bad(copied, overflowing[0])
        assert {p.name: p.read_bytes() for p in copied.iterdir()} == before

    def test_no_model(self, overflowing: tuple[Path, Path], bad: Any, tmp_path: Path) -> None:
        assert str(tmp_path / "gone") in bad(overflowing[1], tmp_path / "gone")

    @pytest.mark.parametrize(
        ("words", "sentence"),
        [
            (("--dtype", "int8"), "--dtype 'int8': want float32, float16 or bfloat16"),
            (("--dtype", "half"), "--dtype 'half': want"),
            (("--device", "tpu"), "--device 'tpu': want cpu, cuda"),
        ],
    )
    def test_options(self, overflowing: tuple[Path, Path], bad: Any, words: tuple[str, ...], sentence: str) -> None:
        assert sentence in bad(overflowing[1], overflowing[0], *words)

    def test_private_data(self, overflowing: tuple[Path, Path], bad: Any, tmp_path: Path, ids: torch.Tensor) -> None:
        model: Any = tiny_model("gemma3_text").train()
        bundle = skipped(model, tmp_path, poisoned(model, ids), keep_batch=False)
        assert "holds no batch, so it cannot be replayed: keep_batch=False" in bad(bundle, overflowing[0])

    def test_another_architecture(
        self, overflowing: tuple[Path, Path], bad: Any, tmp_path: Path, ids: torch.Tensor
    ) -> None:
        other: Any = tiny_model("llama")
        other.save_pretrained(tmp_path)
        line = bad(overflowing[1], tmp_path)
        assert f"{tmp_path} is a llama, but the run of {overflowing[1]} trained a gemma3_text" in line

    def test_a_batch_that_does_not_fit_the_model(self, bad: Any, tmp_path: Path, ids: torch.Tensor) -> None:
        model = BertForSequenceClassification(BERT).train()
        batch = {"input_ids": ids, "labels": torch.tensor([0, 1])}
        bundle = skipped(model, tmp_path / "box", batch, factor=float("nan"))
        BertForTokenClassification(BERT).save_pretrained(tmp_path / "other")
        assert "cannot be run on" in bad(bundle, tmp_path / "other")

    def test_weights_that_are_missing(self, overflowing: tuple[Path, Path], bad: Any, tmp_path: Path) -> None:
        weights = load_file(overflowing[0] / "model.safetensors")
        kept = {k: v for k, v in weights.items() if "layers.2" not in k}
        save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_bytes((overflowing[0] / "config.json").read_bytes())
        assert "lacks 13 weights" in bad(overflowing[1], tmp_path)
