"""A measured need that is kept beside a checkpoint: used for the same weights in any dtype, and for no others."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hfpatch
from hfpatch.lab.branch_overflow import branch_overflow
from hfpatch.lab.tiny import tiny_model
from hfpatch.patching.verifying.kept_need import FILE
from hfpatch.patching.verifying.same_weights import difference, tensors_seen, weights_seen
from hfpatch.patching.verifying.sealed import checksum
from tests.fingerprint import fingerprint
from tests.sampling import first_quick
from tests.test_branch_overflow import BATCH, of
from tests.test_cli import hfpatch as hfpatch_cli
from tests.test_trace_cli import save

ID, STREAM = "fp16-branch-overflow", "fp16-residual-overflow"
TEXT = "".join(map(chr, range(ord(" "), ord(" ") + 60)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint that float16 cannot run, with a tokenizer."""
    model = tiny_model("llama", pad_token_id=None)
    branch_overflow(model, BATCH)
    return save(model.half().float(), tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may change."""
    here = tmp_path / "model"
    here.mkdir()
    for file in checkpoint.iterdir():
        if file.name != FILE:
            (here / file.name).write_bytes(file.read_bytes())
    return here


def load(folder: Path, dtype: torch.dtype = torch.float16) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def plan(model: Any) -> Any:
    return hfpatch.plan(model, only=[ID])


def used(model: Any) -> bool:
    made = plan(model)
    (note,) = [*(n for n in made.unknown if FILE in n)] or [""]
    assert not note or "measure again: hfpatch plan MODEL --text FILE --save" in note
    kept = "kept in hfpatch-measured.json" in of(made).reason
    assert kept is not bool(note)
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("measured", first_quick([torch.float16, torch.float32, torch.bfloat16]), ids=str)
def test_one_dtype_is_measured_and_another_is_loaded(folder: Path, measured: torch.dtype, dtype: torch.dtype) -> None:
    file = hfpatch.plan(load(folder, measured), batch=BATCH).keep()
    assert file == folder / FILE
    model = load(folder, dtype)
    before = fingerprint(model)
    decision = of(hfpatch.plan(model, only=[ID], compute_dtype="float16"))
    assert fingerprint(model) == before
    assert decision.decided == "applied"
    assert "come near 65,504; the largest value reaches" in decision.reason
    assert "model.layers.2.self_attn.o_proj, measured on 24 tokens, kept in hfpatch-measured.json" in decision.reason


def test_it_decides_as_the_batch_did(folder: Path) -> None:
    model = load(folder)
    with_batch = hfpatch.plan(model, batch=BATCH)
    assert with_batch.measured is not None
    with_batch.keep()
    later = load(folder)
    assert [(e.path, e.change) for e in hfpatch.plan(later).edits] == [(e.path, e.change) for e in with_batch.edits]
    fix = hfpatch.apply(later, verbose=False)
    assert of(fix.plan).decided == "applied"
    assert "measured on 24 tokens" in of(fix.plan, STREAM).reason
    with torch.no_grad():
        assert later(**BATCH).logits.isfinite().all()
    assert of(hfpatch.plan(later, only=[ID])).already == 3
    fresh = hfpatch.plan(load(folder), batch=BATCH)
    assert "kept" not in of(fresh).reason


def test_without_need_the_room_is_said(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    hfpatch.plan(load(tmp_path), batch=BATCH).keep()
    decision = of(plan(load(tmp_path)))
    assert decision.edits
    assert "x on 24 tokens, kept in hfpatch-measured.json" in decision.reason
    assert of(hfpatch.plan(load(tmp_path))).decided == "opt-in"


def test_through_wrappers(folder: Path) -> None:
    hfpatch.plan(torch.nn.DataParallel(load(folder)), batch=BATCH).keep()
    assert used(load(folder))
    assert used(torch.nn.DataParallel(load(folder)))
    assert used(torch.compile(load(folder), backend="eager"))
    paths = json.loads((folder / FILE).read_text())["measured"]["values"]
    assert "model.layers.0.mlp" in paths


def test_what_the_file_holds(folder: Path) -> None:
    hfpatch.plan(load(folder), batch=BATCH).keep()
    text = (folder / FILE).read_text()
    content = json.loads(text)
    assert set(content["measured"]) == {"values", "releases", "batch", "class", "files", "weights"}
    assert content["measured"]["batch"].keys() == {"sha256", "tokens"}
    assert content["measured"]["releases"]["torch"] == torch.__version__.partition("+")[0]
    assert str(folder.parent) not in text
    assert len(text) < 100_000


def changed(model: Any, change: Callable[[torch.Tensor], torch.Tensor], name: str = "model.layers.1") -> Any:
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.startswith(name):
                parameter.copy_(change(parameter))
    return model


class TestOtherWeights:
    def test_trained_since(self, folder: Path) -> None:
        """One step at a small rate on one matrix."""
        hfpatch.plan(load(folder), batch=BATCH).keep()
        assert used(load(folder))
        trained = changed(load(folder), lambda p: p + 1e-3 * p.abs().mean(), "model.layers.3.self_attn.v_proj")
        assert not used(trained)
        for dtype in (torch.float32, torch.bfloat16):
            other = changed(load(folder, torch.float32), lambda p: p * 1.02, "model.layers.0.mlp").to(dtype)
            assert not used(other)

    def test_of_another_model(self, folder: Path, tmp_path: Path) -> None:
        hfpatch.plan(load(folder), batch=BATCH).keep()
        for at, other in enumerate((tiny_model("llama", num_hidden_layers=2), tiny_model("gpt2"))):
            there = tmp_path / str(at)
            other.half().save_pretrained(there)
            (there / FILE).write_bytes((folder / FILE).read_bytes())
            assert not used(load(there))

    def test_with_an_adapter(self, folder: Path) -> None:
        from peft import LoraConfig, get_peft_model

        hfpatch.plan(load(folder), batch=BATCH).keep()
        assert not used(get_peft_model(load(folder), LoraConfig(target_modules=["q_proj"])))

    def test_weights_that_are_not_loaded_are_told_by_their_files(self, folder: Path) -> None:
        from hfpatch.model.source import build_on_meta, load_config

        hfpatch.plan(load(folder), batch=BATCH).keep()
        assert (
            "kept in" in of(hfpatch.plan(build_on_meta(load_config(folder)), compute_dtype="float16", only=ID)).reason
        )
        changed(load(folder, torch.float32), lambda p: p * 1.01).save_pretrained(folder)
        made = hfpatch.plan(build_on_meta(load_config(folder)), compute_dtype="float16", only=ID)
        assert "its files of weights are others" in made.unknown[0]
        assert "kept in" not in of(made).reason

    def test_every_parameter_is_looked_at(self) -> None:
        model = tiny_model("llama")
        seen = weights_seen(model)
        assert difference(seen, model) == ""
        for name, parameter in model.named_parameters():
            other = copy.deepcopy(model)
            other.get_parameter(name).data += parameter.abs().max() / 100
            assert difference(seen, other) == f"{name} has other values"


@pytest.mark.parametrize("width", [32, 34, 64, 68, 100])
def test_samples_are_of_many_columns(width: int) -> None:
    """Also where they lie as far apart as a row, or a block of packed weights, is long."""
    layer = torch.nn.Linear(width, 64, bias=False)
    kept = weights_seen(layer)
    with torch.no_grad():
        layer.weight[:, 1:] += 1
    assert difference(kept, layer) == "weight has other values"


def test_values_of_less_than_a_byte_are_told_by_their_bytes() -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    one, same, other = (tensors_seen([("w", t.view(torch.float4_e2m1fn_x2))]) for t in (raw, raw.clone(), raw + 1))
    assert one == same != other


def edited(raw: bytes, at: str, value: Any) -> bytes:
    """The file with a value set, and its checksum made again."""
    content = json.loads(raw)
    *outer, last = at.split("/")
    held = content
    for name in outer:
        held = held[name]
    held[last] = value
    content["checksum"] = checksum(content["measured"])
    return json.dumps(content).encode()


class TestBadFiles:
    @pytest.fixture(scope="class")
    def measured(self, checkpoint: Path) -> bytes:
        return hfpatch.plan(load(checkpoint), batch=BATCH).keep().read_bytes()

    @pytest.fixture
    def kept(self, folder: Path, measured: bytes) -> Path:
        (folder / FILE).write_bytes(measured)
        return folder / FILE

    def note(self, file: Path) -> str:
        made = plan(load(file.parent))
        assert "kept in" not in of(made).reason
        (note,) = [n for n in made.unknown if FILE in n]
        return note

    @pytest.mark.parametrize(
        ("damage", "why"),
        [
            (lambda raw: raw.replace(b'"tokens": 24', b'"tokens": 25'), "it was edited or is damaged"),
            (lambda raw: raw[:-200], "it is not valid JSON"),
            (lambda raw: b"[" * 100_000, "it is nested too deep"),
            (lambda raw: b'{"schema": "\xff"}', "it is not text"),
            (lambda raw: b"[]", "it cannot be compared with this model (TypeError"),
            (lambda raw: b'{"schema": 2}', "a newer hfpatch wrote it (schema 2, known here is 1)"),
            (lambda raw: b" " * (16 * 2**20 + 1), "it has 16,777,217 bytes, and at most 16,777,216 are read"),
            (lambda raw: edited(raw, "measured/batch/tokens", "many"), "no number of tokens"),
            (lambda raw: edited(raw, "measured/batch/tokens", True), "no number of tokens"),
            (lambda raw: edited(raw, "measured/values/model", -1), "a value that is no size"),
            (lambda raw: edited(raw, "measured/values/model", "1e9"), "a value that is no size"),
            (lambda raw: edited(raw, "measured/values/elsewhere", 1), "it has no module 'elsewhere'"),
            (lambda raw: edited(raw, "measured/weights", []), "was measured on another model than this Llama"),
            (lambda raw: edited(raw, "measured/weights", [1] * 39), "it cannot be compared with this model (TypeError"),
        ],
    )
    def test_it_is_not_used(self, kept: Path, damage: Callable[[bytes], bytes], why: str) -> None:
        kept.write_bytes(damage(kept.read_bytes()))
        assert why in self.note(kept)

    @pytest.mark.parametrize("kind", ["pipe", "device", "directory", "link to nothing"])
    def test_it_is_no_ordinary_file(self, kept: Path, kind: str) -> None:
        kept.unlink()
        if kind == "pipe":
            os.mkfifo(kept)
        elif kind == "directory":
            kept.mkdir()
        else:
            kept.symlink_to("/dev/zero" if kind == "device" else "/nowhere")
        if kind == "link to nothing":
            assert not any(FILE in n for n in plan(load(kept.parent)).unknown)
        else:
            assert "is not an ordinary file" in self.note(kept)
        with pytest.raises(hfpatch.errors.InputError, match="is not an ordinary file; remove it"):
            hfpatch.plan(load(kept.parent), batch=BATCH).keep()

    def test_it_cannot_be_written(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A directory that may not be written to: one sentence, and nothing is left in it."""
        made = hfpatch.plan(load(folder), batch=BATCH)
        before = sorted(folder.iterdir())
        real = os.open

        def refused(path: Any, flags: int, *rest: int) -> int:
            if flags & os.O_WRONLY:
                raise PermissionError(13, "Permission denied")
            return real(path, flags, *rest)

        monkeypatch.setattr("hfpatch.report.files.os.open", refused)
        with pytest.raises(hfpatch.errors.InputError, match="no permission to write in"):
            made.keep()
        assert sorted(folder.iterdir()) == before

    def test_a_plan_that_has_nothing_to_keep(self, folder: Path) -> None:
        with pytest.raises(hfpatch.errors.InputError, match=r"want a plan that hfpatch\.plan\(model, batch=batch\)"):
            hfpatch.plan(load(folder)).keep()
        with pytest.raises(hfpatch.errors.InputError, match="was not loaded from a directory"):
            model = tiny_model("llama").half()
            hfpatch.plan(model, batch=BATCH).keep()


def test_from_a_terminal(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    ran = hfpatch_cli("plan", str(folder), "--text", str(text), "--save", "--compute-dtype", "float16")
    assert ran.returncode == 0, ran.stderr
    assert f"hfpatch: kept in {folder / FILE}: later plans of these weights decide with it" in ran.stderr
    assert TEXT[:20] not in (folder / FILE).read_text()
    later = hfpatch_cli("plan", str(folder), "--compute-dtype", "float16", "--json")
    (decision,) = [d for d in json.loads(later.stdout)["decisions"] if d["patch"] == ID]
    assert decision["decision"] == "applied"
    assert "tokens, kept in hfpatch-measured.json" in decision["reason"]
    looked = hfpatch_cli("inspect", str(folder), "--compute-dtype", "float16", "--json")
    assert "kept in hfpatch-measured.json" in looked.stdout
    alone = hfpatch_cli("plan", str(folder), "--save")
    assert (alone.returncode, alone.stdout) == (2, "")
    assert "--save keeps what --text FILE measures" in alone.stderr
