"""The manifest beside a checkpoint: replayed bit for bit on its model, and refused on every other."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

import hfpatch
from hfpatch.errors import ConflictError, HfpatchError, InputError, RefusedError
from hfpatch.lab.branch_overflow import branch_overflow
from hfpatch.lab.tiny import tiny_model
from hfpatch.patching import edits, registry, select
from hfpatch.patching.context import Target
from hfpatch.patching.language import Case, Needed, Patch
from hfpatch.patching.manifest import file as files
from hfpatch.patching.manifest.file import FILE, TENSORS, read
from hfpatch.patching.verifying.proving import repros
from hfpatch.patching.verifying.sealed import checksum
from hfpatch.patching.verifying.trial import build, model_of
from hfpatch.testing import SpeechLLM, example_inputs
from tests import interrupts
from tests.fingerprint import fingerprint
from tests.interrupts import interrupted
from tests.test_map_output import Cap, halved

IDS = {"input_ids": torch.arange(8)[None]}
STREAM, HEAD = "fp16-residual-overflow", "fp32-lm-head"


def logits(model: Any, batch: Any = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**batch).logits


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(autouse=True)
def none_registered() -> Iterator[None]:
    yield
    for patch_id in registry.by_hand():
        hfpatch.unregister(patch_id)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float16 llama with one edit, and its manifest."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = tiny_model("llama").half()
    model.save_pretrained(folder)
    hfpatch.apply(loaded(folder), only=[HEAD, STREAM], verbose=False).save(folder)
    return folder


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may change."""
    here = tmp_path / "model"
    here.mkdir()
    for each in checkpoint.iterdir():
        (here / each.name).write_bytes(each.read_bytes())
    return here


def refused(model: nn.Module, folder: Path, error: type[HfpatchError], says: str) -> None:
    """A manifest is refused, and nothing of the model was changed."""
    before = fingerprint(model)
    with pytest.raises(error, match=says):
        hfpatch.apply(model, manifest=folder, verbose=False)
    assert fingerprint(model) == before


class TestRoundTrip:
    def test_gemma_in_float16(self, tmp_path: Path, capsys: Any) -> None:
        model = tiny_model("gemma3_text").half()
        fix = hfpatch.apply(model, verbose=False)
        model.save_pretrained(tmp_path)
        assert fix.save(tmp_path) == tmp_path / FILE
        again = hfpatch.load(tmp_path)
        assert f"{STREAM} applied (equivalent): 18 edits in the model; replayed from hfpatch.json" in (
            capsys.readouterr().err
        )
        assert logits(again).equal(logits(model))
        assert not logits(loaded(tmp_path)).equal(logits(model))  # it is needed
        states = {(e.path, e.record.slot, e.state.word) for e in hfpatch.status(again, compare=True).edits}
        assert states == {(e.path, e.slot, "here") for e in fix.edits}

    def test_twice_is_once_and_a_revert_restores(self, folder: Path) -> None:
        model = loaded(folder)
        before, stock = fingerprint(model), logits(model)
        first = hfpatch.apply(model, manifest=folder, verbose=False)
        once, patched = fingerprint(model), logits(model)
        assert len(first.edits) > 10
        second = hfpatch.apply(model, manifest=folder, verbose=False)
        assert (second.edits, {d.code for d in second.plan.decisions}) == ((), {"already-applied"})
        assert fingerprint(model) == once
        assert hfpatch.apply(model, only=[HEAD, STREAM], verbose=False).edits == ()  # the plan sees the same edits
        hfpatch.revert(model)
        assert fingerprint(model) == before
        assert logits(model).equal(stock)
        assert not stock.equal(patched)

    @pytest.mark.slow
    def test_its_handle_verifies(self, folder: Path) -> None:
        fix = hfpatch.apply(loaded(folder), manifest=folder, verbose=False)
        rows = {row.name: row for row in fix.verify(IDS, runs=["before", "after"]).rows}
        assert rows["after"].kl < rows["before"].kl

    def test_on_the_model_that_was_patched(self, folder: Path) -> None:
        model = loaded(folder)
        hfpatch.apply(model, only=[HEAD, STREAM], verbose=False)
        assert hfpatch.apply(model, manifest=folder, verbose=False).edits == ()

    def test_edits_that_are_gone_are_made_again(self, folder: Path) -> None:
        model = loaded(folder)
        fix = hfpatch.apply(model, manifest=folder, verbose=False)
        want = logits(model)
        for module in model.modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
        assert not logits(model).equal(want)
        with pytest.raises(InputError, match=r"applied.save: .* of .* is without its hook"):
            fix.save(folder)
        assert hfpatch.apply(model, manifest=folder, verbose=False).edits
        assert logits(model).equal(want)

    @pytest.mark.slow
    def test_through_wrappers(self, folder: Path, tmp_path: Path) -> None:
        bare = loaded(folder)
        want = logits(hfpatch.load(folder, verbose=False))
        hfpatch.apply(nn.DataParallel(bare), manifest=folder, verbose=False)
        assert logits(bare).equal(want)
        wrapped = nn.DataParallel(loaded(folder))
        hfpatch.apply(wrapped, only=[HEAD, STREAM], verbose=False).save(tmp_path)
        assert {e.path for p in read_it(tmp_path).patches for e in p.edits} >= {"lm_head", "model.norm"}
        assert logits(hfpatch.apply(loaded(folder), manifest=tmp_path, verbose=False).model).equal(want)

    def test_a_saved_replay_is_the_same_manifest(self, folder: Path, tmp_path: Path) -> None:
        model = loaded(folder)
        hfpatch.apply(model, manifest=folder, verbose=False).save(tmp_path)
        one, two = read_it(folder).to_dict(), read_it(tmp_path).to_dict()
        assert one["again"] == two["again"] == [STREAM, HEAD]
        assert [p["edits"] for p in one["patches"]] == [p["edits"] for p in two["patches"]]

    def test_patches_of_two_applications(self, folder: Path, tmp_path: Path) -> None:
        model = loaded(folder)
        hfpatch.apply(model, only=HEAD, verbose=False)
        hfpatch.apply(model, only=STREAM, verbose=False).save(tmp_path)
        assert read_it(tmp_path).again == (HEAD, STREAM)
        assert logits(hfpatch.apply(loaded(folder), manifest=tmp_path, verbose=False).model).equal(logits(model))

    @pytest.mark.slow
    def test_norms_that_the_loader_keeps_wide(self, tmp_path: Path) -> None:
        """A cast made norms float16 that `from_pretrained` keeps in float32."""
        model = tiny_model("gpt_oss").half()
        fix = hfpatch.apply(model, verbose=False)
        model.save_pretrained(tmp_path)
        fix.save(tmp_path)
        assert loaded(tmp_path).model.norm.weight.dtype == torch.float32
        refused(loaded(tmp_path), tmp_path, RefusedError, "norm.weight is float32 .*, and was float16")
        assert logits(hfpatch.load(tmp_path, verbose=False)).equal(logits(model))

    @pytest.mark.slow
    def test_weights_scaled_in_place(self, tmp_path: Path) -> None:
        """A checkpoint with scaled weights needs the rest of the patch, and a revert of the loaded model unscales."""
        case = next(iter(repros(registry.get("rwkv-rescale"))))
        model: Any = model_of(case)
        model.eval()
        with torch.no_grad():
            model(**IDS)  # divides
        stock = copy.deepcopy(model)
        fix = hfpatch.apply(model, only="rwkv-rescale", verbose=False)
        assert "tensor weight" in {e.slot for e in fix.edits}
        fix.save(tmp_path)
        again = copy.deepcopy(stock)
        again.load_state_dict(model.state_dict())
        handle = hfpatch.apply(again, manifest=tmp_path, verbose=False)
        assert "tensor weight" not in {e.slot for e in handle.edits}
        assert {k: v for k, v in again.state_dict().items() if not v.equal(model.state_dict()[k])} == {}
        assert logits(again).equal(logits(model))
        assert hfpatch.apply(again, manifest=tmp_path, verbose=False).edits == ()
        handle.revert()
        assert {k: v for k, v in again.state_dict().items() if not v.equal(stock.state_dict()[k])} == {}
        hfpatch.apply(stock, manifest=tmp_path, verbose=False)
        assert logits(stock).equal(logits(model))

    def test_what_the_file_holds(self, folder: Path) -> None:
        text = (folder / FILE).read_text()
        content = json.loads(text)
        assert content.keys() == {"schema", "checksum", "manifest"}
        assert content["schema"] == 1
        assert content["manifest"]["releases"]["torch"] == torch.__version__.partition("+")[0]
        assert str(folder.parent) not in text
        assert not (folder / TENSORS).exists()
        assert len(text) < 60_000
        manifest = read_it(folder)
        shown = str(manifest)
        assert "not saved with the weights: to be applied again" in str(manifest.sheet().rows)
        assert "hfpatch.load(DIR), or hfpatch.apply(model, manifest=DIR)" in shown


def read_it(folder: Path) -> files.Manifest:
    found = read(folder)
    assert found is not None
    return found


def speech() -> Any:
    """A composite of one's own, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        return SpeechLLM(tiny_model("gemma3_text"))


class TestTensors:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> tuple[Any, Any, Path]:
        model = speech()
        fix = hfpatch.apply(model, only=["projection-init", "eps-alignment", "embed-token-resolver"], verbose=False)
        fix.save(tmp_path)
        return model, fix, tmp_path

    def test_on_the_model_before_and_on_the_one_saved(self, saved: tuple[Any, Any, Path]) -> None:
        model, fix, folder = saved
        (tensors,) = (folder / TENSORS).iterdir()
        stock = speech()
        assert not stock.speech_proj.weight.equal(model.speech_proj.weight)
        bare = fingerprint(stock)
        first = hfpatch.apply(stock, manifest=folder, verbose=False)
        assert {k: v for k, v in stock.state_dict().items() if not v.equal(model.state_dict()[k])} == {}
        assert len(first.edits) == len(fix.edits)
        assert stock.ln_speech.eps == model.ln_speech.eps
        assert stock.get_input_embeddings() is stock.llm.get_input_embeddings()
        first.revert()
        assert fingerprint(stock) == bare
        other = speech()
        other.load_state_dict(model.state_dict())
        second = hfpatch.apply(other, manifest=folder, verbose=False)
        assert {e.slot for e in second.edits} == {"eps", "get_input_embeddings"}  # the rest is in the weights
        assert {k: v for k, v in other.state_dict().items() if not v.equal(model.state_dict()[k])} == {}
        assert "projection-init" in hfpatch.status(other, compare=True).patches
        assert hfpatch.apply(other, manifest=folder, verbose=False).edits == ()
        second.revert()
        assert {k: v for k, v in other.state_dict().items() if not v.equal(speech().state_dict()[k])} == {}
        assert tensors.stat().st_size < 100_000
        words = {row[0]: row[3] for row in read_it(folder).sheet().rows}
        assert words["projection-init"] == "in the weights"
        assert set(read_it(folder).again) == {"embed-token-resolver", "eps-alignment"}

    def test_options_are_kept(self, tmp_path: Path) -> None:
        model = speech()
        chosen = {"projection-init": {"std": 0.5, "modules": [model.speech_proj]}}
        fix = hfpatch.apply(model, only="projection-init", options=chosen, verbose=False)
        fix.save(tmp_path)
        (patch,) = read_it(tmp_path).patches
        assert patch.options == {"std": 0.5, "modules": ["speech_proj"]}
        stock = speech()
        hfpatch.apply(stock, manifest=tmp_path, verbose=False)
        assert stock.speech_proj.weight.equal(model.speech_proj.weight)

    def test_trained_since_it_is_a_weight_like_the_others(self, saved: tuple[Any, Any, Path]) -> None:
        model, fix, folder = saved
        with torch.no_grad():
            model.speech_proj.weight += 0.1
        fix.save(folder)
        kinds = {e.where for p in read_it(folder).patches for e in p.edits if p.id == "projection-init"}
        assert "trained" in kinds
        other = speech()
        other.load_state_dict(model.state_dict())
        hfpatch.apply(other, manifest=folder, verbose=False)
        assert other.speech_proj.weight.equal(model.speech_proj.weight)
        hfpatch.revert(other)
        assert other.speech_proj.weight.equal(model.speech_proj.weight)
        refused(speech(), folder, RefusedError, "speech_proj.weight has other values")

    def test_a_tensor_that_is_neither_before_nor_after(self, saved: tuple[Any, Any, Path]) -> None:
        model, _, folder = saved
        other = speech()
        other.load_state_dict(model.state_dict())
        with torch.no_grad():
            other.speech_proj.weight[3, 5] += 1e-3  # one value of 2,000
        refused(other, folder, RefusedError, "weight holds other values than before and after the patch")

    def test_an_attribute_that_is_neither_before_nor_after(self, saved: tuple[Any, Any, Path]) -> None:
        other = speech()
        other.ln_speech.eps = 0.5
        refused(other, saved[2], RefusedError, r"sets eps of ln_speech .*it is 0\.5, and was 0.0001 before the patch")

    @pytest.mark.parametrize("damage", ["edited", "cut", "gone", "pipe", "others"])
    def test_a_file_of_tensors_that_was_changed(self, saved: tuple[Any, Any, Path], damage: str) -> None:
        (tensors,) = (saved[2] / TENSORS).iterdir()
        raw = tensors.read_bytes()
        tensors.unlink()
        if damage == "edited":
            tensors.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        elif damage == "cut":
            tensors.write_bytes(raw[:-1])
        elif damage == "pipe":
            os.mkfifo(tensors)
        elif damage == "others":
            tensors.write_bytes(raw)
            held = load_file(tensors)
            save_file({name: value + 1 for name, value in held.items()}, tensors)
        refused(speech(), saved[2], InputError, r"safetensors (is not there|cannot be used: it (is not|was changed))")

    def test_an_older_file_of_tensors_is_removed(self, saved: tuple[Any, Any, Path]) -> None:
        model, fix, folder = saved
        (old,) = (folder / TENSORS).iterdir()
        (folder / TENSORS / ".0123456789abcdef.tmp").touch()
        fix.revert()
        chosen = {"projection-init": {"std": 0.5}}
        fix = hfpatch.apply(model, only="projection-init", options=chosen, verbose=False)
        fix.save(folder)
        (new,) = (folder / TENSORS).iterdir()
        assert new != old
        fix.revert()
        hfpatch.apply(model, only="eps-alignment", verbose=False).save(folder)
        assert not (folder / TENSORS).exists()

    def test_it_is_cast_after_the_patch(self, saved: tuple[Any, Any, Path]) -> None:
        model, fix, folder = saved
        model.half()
        fix.save(folder)
        stock = speech().half()
        hfpatch.apply(stock, manifest=folder, verbose=False)
        assert {k: v for k, v in stock.state_dict().items() if not v.equal(model.state_dict()[k])} == {}


@pytest.mark.slow
def test_interrupted_at_every_line_that_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that ends early leaves a revert that restores the model, before the patch and with saved weights."""
    engine = Path(hfpatch.__file__).parent / "patching"
    monkeypatch.setattr(interrupts, "TRACED", tuple(str(engine / n) for n in ("writing.py", "record.py", "kinds")))
    model = speech()
    hfpatch.apply(model, only=["projection-init", "eps-alignment"], verbose=False).save(tmp_path)
    saved = speech()
    saved.load_state_dict(model.state_dict())
    for each in (speech(), saved):
        before, held = fingerprint(each), copy.deepcopy(each.state_dict())
        for at in itertools.count(1, 2):
            replayed = partial(hfpatch.apply, each, manifest=tmp_path, verbose=False)
            where = interrupted(replayed, at, KeyboardInterrupt)
            if not where:
                break
            if each is saved:  # its weights were never written
                assert {k: v for k, v in each.state_dict().items() if not v.equal(held[k])} == {}, where
                hfpatch.revert(each)
                each.load_state_dict(held)
            else:
                hfpatch.revert(each)
            assert fingerprint(each) == before, where
            assert not hfpatch.status(each).edits, where
        assert at > 60


class TestAnotherModel:
    def test_other_weights(self, folder: Path) -> None:
        model = loaded(folder)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.mul_(1.02)
        refused(model, folder, RefusedError, "another model than this LlamaForCausalLM: .*up_proj.weight has other")

    @pytest.mark.parametrize(
        ("make", "says"),
        [
            (lambda: tiny_model("llama", num_hidden_layers=2).half(), "it has no 'model.layers.2"),
            (lambda: tiny_model("llama", num_hidden_layers=5).half(), "it has model.layers.4.* which was not there"),
            (lambda: tiny_model("llama"), "is float32 .*, and was float16"),
            (lambda: tiny_model("llama", intermediate_size=96).half(), r"is float16 \[96, .*, and was float16 \[48"),
            (lambda: tiny_model("gpt2").half(), "it has no 'model.embed_tokens.weight'"),
            (lambda: nn.Linear(2, 2), "another model than this Linear"),
        ],
    )
    def test_another_shape_dtype_or_kind(self, folder: Path, make: Callable[[], Any], says: str) -> None:
        refused(make(), folder, RefusedError, says)

    def test_a_buffer_that_a_checkpoint_holds(self, tmp_path: Path) -> None:
        def made() -> Any:
            model: Any = speech()
            model.register_buffer("mean", torch.ones(3))
            return model

        hfpatch.apply(made(), only="eps-alignment", verbose=False).save(tmp_path)
        hfpatch.apply(made(), manifest=tmp_path, verbose=False)
        other = made()
        other.mean += 1
        refused(other, tmp_path, RefusedError, "mean has other values")

    def test_a_drifted_body(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 1

        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
        refused(loaded(folder), folder, RefusedError, "LlamaMLP.forward has another body than when it was saved")

    def test_a_forward_that_is_set_on_a_module(self, folder: Path) -> None:
        model = loaded(folder)
        model.lm_head.forward = lambda x: x
        refused(model, folder, RefusedError, "lm_head.forward, set on this module, which was not there")

    def test_a_module_that_was_replaced(self, folder: Path) -> None:
        class Other(nn.Linear):
            pass

        model = loaded(folder)
        new = Other(model.lm_head.in_features, model.lm_head.out_features, bias=False, dtype=torch.float16)
        new.load_state_dict(model.lm_head.state_dict())
        model.lm_head = new
        refused(model, folder, RefusedError, "lm_head is a Other, and was a Linear|Linear.forward")

    def test_what_is_other_and_cannot_be_in_a_checkpoint_is_said(self, folder: Path, capsys: Any) -> None:
        model = loaded(folder)
        model.set_attn_implementation("eager")
        model.model.rotary_emb.inv_freq *= 2
        hfpatch.apply(model, manifest=folder)
        said = capsys.readouterr().err
        assert "the model attends by eager, and did by 'sdpa' when it was saved: other rounding" in said
        assert "inv_freq, which no checkpoint holds, is other than when it was saved" in said

    def test_another_patch_in_the_same_place(self, tmp_path: Path) -> None:
        hfpatch.apply(speech(), only="eps-alignment", verbose=False).save(tmp_path)
        model = speech()
        hfpatch.register(EPS, id="my-eps")
        hfpatch.apply(model, only="my-eps", verbose=False)
        refused(model, tmp_path, ConflictError, "wants eps of ln_speech to be 1e-06, and my-eps has set it to 0.25")

    def test_an_edit_that_fails_undoes_the_others(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from hfpatch.patching.kinds.cast_output import CastOutput

        def fails(*_: Any) -> None:
            raise OSError("the disk is full")

        monkeypatch.setattr(CastOutput, "write", fails)
        refused(loaded(folder), folder, HfpatchError, "could not become .*the disk is full")


class TestAdapters:
    @pytest.mark.slow
    def test_before_an_adapter_with_it_and_merged(self, tmp_path: Path) -> None:
        from peft import LoraConfig, PeftModel, get_peft_model

        base, adapter, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
        tiny_model("gemma3_text").half().save_pretrained(base)
        model = loaded(base)
        fix = hfpatch.apply(model, verbose=False)
        wrapped: Any = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        grown = hfpatch.apply(wrapped, only="lora-target-expansion", verbose=False)
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_B" in name:
                    parameter.normal_()
        wrapped.save_pretrained(adapter)
        grown.save(adapter)
        words = {row[0]: row[3] for row in read_it(adapter).sheet().rows}
        assert words["lora-target-expansion"] == "in the adapter that PEFT saves"
        assert read_it(adapter).again == (STREAM,)
        again = PeftModel.from_pretrained(loaded(base), adapter)
        hfpatch.apply(again, manifest=adapter, verbose=False)
        want = logits(wrapped)
        assert logits(again).equal(want)
        assert logits(hfpatch.load(adapter, verbose=False)).equal(want)
        refused(loaded(base), adapter, RefusedError, "it has no 'model.layers.0.self_attn.q_proj.base_layer.weight'")
        fix.save(adapter)  # from the handle of the model inside
        assert logits(hfpatch.load(adapter, verbose=False)).equal(want)
        whole = wrapped.merge_and_unload()
        whole.save_pretrained(merged)
        fix.save(merged)
        assert logits(hfpatch.load(merged, verbose=False)).equal(logits(whole))
        refused(again, merged, RefusedError, "it has no 'model.layers.0.self_attn.q_proj.weight'")

    def test_an_adapter_without_its_files(self, tmp_path: Path) -> None:
        base = tmp_path / "base"
        tiny_model("llama").half().save_pretrained(base)
        fix = hfpatch.apply(loaded(base), only=HEAD, verbose=False)
        fix.save(tmp_path)
        for text, says in (
            ("[1]", "want the config of an adapter"),
            ("{", "it is not valid JSON"),
            ('{"peft_type": "LORA"}', r"without adapter_model\.safetensors; pickled weights are never read"),
            ('{"peft_type": "LORA", "base_model_name_or_path": null}', "names no base model"),
        ):
            (tmp_path / "adapter_config.json").write_text(text)
            if "null" in text:
                save_file({"x": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
            with pytest.raises(InputError, match=says):
                hfpatch.load(tmp_path)


class TestLoading:
    @pytest.mark.slow
    def test_from_the_hub_cache(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Any) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        place = tmp_path / "models--org--patched"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text("abc")
        shutil.copytree(folder, place / "snapshots" / "abc")
        want = logits(hfpatch.load(folder, verbose=False))
        assert logits(hfpatch.load("org/patched", verbose=False)).equal(want)
        assert here("inspect", "org/patched", "--json").figures["manifest"]["again"] == [STREAM, HEAD]
        with pytest.raises(InputError, match="org/other: no such directory here"):
            hfpatch.load("org/other")

    @pytest.mark.slow
    def test_no_code_of_the_directory_is_run(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from peft import LoraConfig, get_peft_model

        code = f"open({str(tmp_path / 'ran')!r}, 'w')"
        adapter = tmp_path / "adapter"
        model = loaded(folder)
        get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(adapter)
        hfpatch.apply(model, only=HEAD, verbose=False).save(adapter)
        config = json.loads((adapter / "adapter_config.json").read_text())
        config |= {
            "base_model_name_or_path": str(folder),
            "auto_mapping": {"base_model_class": "Evil", "parent_library": "evil"},
        }
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        own = json.loads((folder / "config.json").read_text())
        own["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
        (folder / "config.json").write_text(json.dumps(own))
        for place in (folder, adapter):
            (place / "evil.py").write_text(code)
            (place / "modeling_evil.py").write_text(code)
        monkeypatch.syspath_prepend(str(adapter))
        assert type(hfpatch.load(folder, verbose=False)).__name__ == "LlamaForCausalLM"
        assert type(hfpatch.load(adapter, verbose=False)).__name__ == "PeftModel"
        assert not (tmp_path / "ran").exists()
        (folder / "config.json").write_text(json.dumps(own | {"attn_implementation": "someone/kernel"}))
        with pytest.raises(InputError, match="names code on the hub"):
            hfpatch.load(folder)

    def test_an_attention_that_needs_a_kernel_is_not_asked_for(self, folder: Path, capsys: Any) -> None:
        change(folder, "attention/", "flash_attention_2")
        model: Any = hfpatch.load(folder)
        assert model.config._attn_implementation == "sdpa"
        assert "attends by sdpa, and did by 'flash_attention_2'" in capsys.readouterr().err

    def test_a_pickle_is_not_read(self, folder: Path, tmp_path: Path) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(InputError, match="its weights are a pickle"):
            hfpatch.load(folder)

    def test_weights_that_are_missing(self, folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        held.pop("model.norm.weight")
        held.pop("model.layers.1.mlp.up_proj.weight")
        save_file(held, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(RefusedError, match=r"up_proj\.weight has other values"):
            hfpatch.load(folder)


def patch_of(edit: Any, **words: Any) -> Patch:
    return Patch(
        title="One of mine",
        architectures=("*",),
        condition=lambda _context: Needed("always"),
        edits=(edit,),
        effect="changes-function",
        symptom=lambda _trial: None,
        repros=(Case("llama"),),
        leaves_alone=(Case("gpt2"),),
        **words,
    )


NORMS = select.loose_norms()
EPS = patch_of(edits.set_attribute(NORMS, "eps", lambda _c, _t: 0.25, "set eps"), whole=True)
HEADS = select.Selection(
    "heads", lambda c: [Target(p, m) for p, m in c.survey.modules.items() if p.endswith("lm_head")]
)


def by(function: Any) -> Patch:
    return patch_of(edits.map_output(HEADS, function, "map it"))


class TestForeignPatches:
    def test_registered_by_hand(self, folder: Path, tmp_path: Path) -> None:
        hfpatch.register(EPS, id="my-eps")
        hfpatch.apply(speech(), only="my-eps", verbose=False).save(tmp_path)
        (patch,) = read_it(tmp_path).patches
        assert (patch.origin, patch.digest) == ("registered by hand", "")
        model = speech()
        hfpatch.apply(model, manifest=tmp_path, verbose=False)
        assert model.ln_speech.eps == 0.25
        assert "my-eps (registered by hand)" in str(hfpatch.status(model))
        hfpatch.unregister("my-eps")
        refused(speech(), tmp_path, RefusedError, "patch my-eps of registered by hand, which is not registered in this")

    @pytest.mark.parametrize("function", [halved, Cap(0.5), lambda x: x * 2])
    def test_a_function_is_made_again_by_its_patch(self, folder: Path, tmp_path: Path, function: Any) -> None:
        hfpatch.register(by(function), id="my-map")
        model = loaded(folder)
        hfpatch.apply(model, only="my-map", verbose=False).save(tmp_path)
        again = loaded(folder)
        hfpatch.apply(again, manifest=tmp_path, verbose=False)
        assert logits(again).equal(logits(model))
        assert hfpatch.apply(again, manifest=tmp_path, verbose=False).edits == ()
        for other in (lambda x: x / 3, Cap(0.25)):
            hfpatch.unregister("my-map")
            hfpatch.register(by(other), id="my-map")
            refused(
                loaded(folder), tmp_path, RefusedError, "was made by output by .*, and my-map makes it by output by"
            )

    def test_a_function_that_cannot_be_told_from_others(self, folder: Path, tmp_path: Path) -> None:
        weight = torch.ones(1)
        hfpatch.register(by(lambda x: x * weight), id="my-map")
        fix = hfpatch.apply(loaded(folder), only="my-map", verbose=False)
        with pytest.raises(
            InputError, match="cannot be saved: it holds a value of type Tensor; define it as a function"
        ):
            fix.save(tmp_path)
        assert not (tmp_path / FILE).exists()

    def test_an_id_that_another_patch_has_here(self, folder: Path) -> None:
        change(folder, "patches/0/origin", "acme-patches 1.2")
        refused(
            loaded(folder), folder, RefusedError, r"needs the patch .* \(acme-patches 1.2\), and here it is another"
        )


def change(folder: Path, at: str, value: Any) -> None:
    """Set a value in the file, and make its checksum again."""
    content = json.loads((folder / FILE).read_text())
    held = content["manifest"]
    *outer, last = at.split("/")
    for name in outer:
        held = held[int(name) if isinstance(held, list) else name]
    held[int(last) if isinstance(held, list) else last] = value
    content["checksum"] = checksum(content["manifest"])
    (folder / FILE).write_text(json.dumps(content))


class TestBadFiles:
    @pytest.mark.parametrize(
        ("damage", "says"),
        [
            (lambda raw: raw.replace(b"equivalent", b"equivalend", 1), "it was edited or is damaged"),
            (lambda raw: raw[:-200], "it is not valid JSON"),
            (lambda raw: b"", "it is not valid JSON"),
            (lambda raw: b"[" * 200_000, "it is nested too deep"),
            (lambda raw: b'{"schema": "\xff"}', "it is not text"),
            (lambda raw: b"[]", "is no manifest of hfpatch"),
            (lambda raw: b"7", "is no manifest of hfpatch"),
            (lambda raw: b'{"schema": NaN}', "it holds NaN"),
            (lambda raw: b'{"schema": ' + b"9" * 5000 + b"}", "a number of thousands of digits"),
            (lambda raw: b'{"schema": 1, "schema": 1}', "it names schema twice"),
            (lambda raw: b'{"schema": 2}', r"a newer hfpatch wrote it \(schema 2, known here is 1\)"),
            (lambda raw: b'{"schema": true, "manifest": {}, "checksum": ""}', "it was edited or is damaged"),
            (lambda raw: b'{"schema": 1, "manifest": {}, "checksum": "44136fa355b3678a"}', "want model, releases"),
        ],
    )
    def test_it_is_refused(self, folder: Path, damage: Callable[[bytes], bytes], says: str) -> None:
        (folder / FILE).write_bytes(damage((folder / FILE).read_bytes()))
        refused(loaded(folder), folder, InputError, says)
        with pytest.raises(InputError, match=says):
            hfpatch.load(folder)

    @pytest.mark.parametrize(
        ("at", "value", "error", "says"),
        [
            ("patches", {}, InputError, "patches is {}"),
            ("patches/0/edits", 3, InputError, r"edits is 3"),
            ("patches/0/id", "nothing", RefusedError, "needs the patch nothing, which is not registered"),
            ("patches/0/effect", "good", InputError, "effect is 'good'"),
            ("patches/0/edits/0/path", "model.nowhere", RefusedError, "model.nowhere is not there"),
            ("patches/0/edits/0/where", "elsewhere", InputError, "where is 'elsewhere'"),
            ("patches/0/edits/0/where", "weights", InputError, "cannot be used: it has no digests"),
            ("patches/0/edits/0/change", {"kind": "Exec"}, InputError, "no kind of change 'Exec' here"),
            ("patches/0/edits/0/change", {"kind": ["x"]}, InputError, "no kind of change"),
            ("patches/0/edits/0/change", {"kind": "CastInput"}, InputError, "CastInput is {}: want rule"),
            (
                "patches/0/edits/0/change",
                {"kind": "SetTensor", "name": "weight"},
                InputError,
                "no kind of change 'SetT",
            ),
            ("patches/0/edits/0/change", None, RefusedError, "which cannot be made: it was made by"),
            (
                "patches/0/edits/0/change",
                {"kind": "SetAttribute", "name": "_forward_hooks", "value": 3},
                InputError,
                "it sets no public attribute to a plain value",
            ),
            (
                "patches/0/edits/0/change",
                {"kind": "SetAttribute", "name": "in_features", "value": {"a": 1}},
                InputError,
                "it sets no public attribute to a plain value",
            ),
            (
                "patches/0/edits/0/change",
                {"kind": "ChooseAttention", "implementation": "someone/kernel"},
                RefusedError,
                "has no attention 'someone/kernel'",
            ),
            ("patches/0/edits/0/change", {"kind": "ScaleTensor", "name": 3, "exponent": 1}, InputError, "name is 3"),
            ("patches/0/edits/0/change", {"kind": "ScaleMap", "exponent": 1.5}, InputError, "exponent is 1.5"),
            ("weights", [["a"]], InputError, r"weights\[0\] is \['a'\]"),
            ("weights/0/1", [2, "x"], InputError, r"weights\[0\]\[1\]\[1\] is 'x'"),
            ("weights/0/3", "x", RefusedError, "has other values"),
            ("bodies", {}, RefusedError, "which was not there"),
            ("attention", {"": 3}, InputError, "attention. is 3"),
            ("tensors", {"name": "../../x", "bytes": 3, "sha256": "x"}, InputError, "is not there"),
            ("tensors", {"name": "x"}, InputError, "tensors is {'name': 'x'}"),
        ],
    )
    def test_values_of_another_type(self, folder: Path, at: str, value: Any, error: Any, says: str) -> None:
        change(folder, at, value)
        refused(loaded(folder), folder, error, says)

    def test_it_is_too_large(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fix = hfpatch.apply(loaded(folder), only=HEAD, verbose=False)
        monkeypatch.setattr(files, "MOST", 2000)
        refused(loaded(folder), folder, InputError, "cannot be used: it has .* bytes, and at most 2,000 are read")
        with pytest.raises(InputError, match=r"the manifest takes .* bytes, above 2,000"):
            fix.save(folder)

    @pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
    def test_it_is_no_ordinary_file(self, folder: Path, kind: str) -> None:
        fix = hfpatch.apply(loaded(folder), only=HEAD, verbose=False)
        (folder / FILE).unlink()
        if kind == "pipe":
            os.mkfifo(folder / FILE)
        elif kind == "directory":
            (folder / FILE).mkdir()
        else:
            (folder / FILE).symlink_to("/dev/zero")
        refused(loaded(folder), folder, InputError, r"hfpatch.json cannot be used: it is not an ordinary file")
        with pytest.raises(InputError, match="is not an ordinary file"):
            fix.save(folder)

    def test_there_is_none(self, folder: Path, tmp_path: Path) -> None:
        refused(loaded(folder), folder / FILE, InputError, r"is a file; manifest= wants the directory")
        (folder / FILE).unlink()
        refused(loaded(folder), folder, InputError, r"holds no hfpatch.json, which applied.save\(dir\) writes beside")
        with pytest.raises(InputError, match=r"holds no hfpatch\.json, which applied\.save"):
            hfpatch.load(folder)
        with pytest.raises(InputError, match=r"nowhere/at/all: no such directory"):
            hfpatch.load("nowhere/at/all")

    def test_other_arguments_beside_it(self, folder: Path) -> None:
        model = loaded(folder)
        for words in ({"only": HEAD}, {"exclude": []}, {"options": {}}, {"batch": IDS}, {"compute_dtype": "float16"}):
            with pytest.raises(InputError, match=f"and {next(iter(words))}= decides anew: leave one of them out"):
                hfpatch.apply(model, manifest=folder, **words)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="no installed package 'acme'"):
            hfpatch.apply(model, manifest=folder, trust="acme")


class TestSaving:
    def test_nothing_to_save(self, folder: Path, tmp_path: Path) -> None:
        fix = hfpatch.apply(loaded(folder), only=HEAD, verbose=False)
        with pytest.raises(InputError, match=r"there is no directory .*nowhere; save the model there first"):
            fix.save(tmp_path / "nowhere")
        fix.revert()
        with pytest.raises(InputError, match="this LlamaForCausalLM carries no patch; apply one first"):
            fix.save(tmp_path)

    def test_weights_that_are_not_loaded(self, folder: Path, tmp_path: Path) -> None:
        from hfpatch.model.source import build_on_meta, load_config

        fix = hfpatch.apply(build_on_meta(load_config(folder)), only=STREAM, verbose=False)
        with pytest.raises(InputError, match="the weights are on meta, so they cannot be told from others"):
            fix.save(tmp_path)

    def test_a_value_that_was_set_since(self, tmp_path: Path) -> None:
        model = speech()
        fix = hfpatch.apply(model, only="eps-alignment", verbose=False)
        model.ln_speech.eps = 0.5
        with pytest.raises(InputError, match=r"eps of ln_speech is 0\.5, and eps-alignment had set it to 1e-06"):
            fix.save(tmp_path)

    def test_the_plan_says_what_a_checkpoint_lacks(self, folder: Path) -> None:
        text = " ".join(str(hfpatch.plan(speech(), only=["projection-init", "eps-alignment"])).split())
        assert "projection-init: in the weights" in text
        assert "eps-alignment: not saved with the weights: to be applied again" in text
        assert "applied.save(dir) writes a manifest" in text
        assert "in the weights" not in str(hfpatch.plan(loaded(folder), only="eps-alignment"))

    def test_what_a_save_and_a_load_keep(self, tmp_path: Path) -> None:
        """The words about places are true: of each kind, a checkpoint is saved and loaded without the patch."""
        model = tiny_model("llama").half()
        model.set_attn_implementation("eager")
        fix = hfpatch.apply(model, only=["fp32-buffers", "fp32-attention-logits", STREAM], verbose=False)
        model.save_pretrained(tmp_path)
        bare = loaded(tmp_path)
        kept = {
            e.slot: e.change.read(bare, bare.get_submodule(e.path), e.change.inverse(bare, bare.get_submodule(e.path)))
            for e in fix.edits
        }
        lost = {"nowhere": False, "loader": True}
        for e in fix.edits:
            assert kept[e.slot].in_force is lost[e.change.in_checkpoint], e.slot
        assert {e.change.in_checkpoint for e in fix.edits} == lost.keys()


@pytest.mark.slow
@pytest.mark.parametrize("patch_id", sorted(set(registry.entries()) - {"cudnn-attention-backward-nan"}))
def test_each_patch(patch_id: str, tmp_path: Path) -> None:
    """On one of its own cases: replayed on the model as it was, and on one with the saved weights."""
    entry = registry.get(patch_id)
    trial = build(next(c for c in repros(entry) if c.device == "cpu"))
    model = trial.model
    stock, other = copy.deepcopy(model), copy.deepcopy(model)
    before = fingerprint(stock)
    rest = [name for name in registry.entries() if name not in {patch_id, *entry.patch.needs}]
    batch = trial.inputs() if trial.case.branches else None
    fix = hfpatch.apply(model, include=patch_id, exclude=rest, batch=batch, verbose=False)
    fix.save(tmp_path)
    want = trial.logits()
    if patch_id == "lora-target-expansion":  # PEFT saves the layers, and makes them when it loads
        refused(stock, tmp_path, RefusedError, "it has no '.*base_layer")
        stock, other = copy.deepcopy(model), copy.deepcopy(model)
        before = fingerprint(stock)
    other.load_state_dict(model.state_dict())
    for each in (stock, other):
        hfpatch.apply(each, manifest=tmp_path, verbose=False)
        assert hfpatch.apply(each, manifest=tmp_path, verbose=False).edits == ()
        got = dataclasses.replace(trial, model=each).logits()
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        assert hfpatch.status(each).to_dict()["patches"] == hfpatch.status(model).to_dict()["patches"]
    if patch_id != "lora-target-expansion":
        hfpatch.revert(stock)
        assert fingerprint(stock) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", ["t5", "whisper", "gemma3", "llava", "falcon", "mllama", "olmo2", "qwen3_next"]
)
def test_saved_and_loaded(architecture: str, tmp_path: Path) -> None:
    """Encoders, decoders, towers: everything that is applied here, from the checkpoint alone."""
    model = tiny_model(architecture).half()
    batch = example_inputs(model)
    fix = hfpatch.apply(model, include="suggested", verbose=False)
    assert fix.edits
    model.save_pretrained(tmp_path)
    fix.save(tmp_path)
    again = hfpatch.load(tmp_path, verbose=False)
    assert logits(again, batch).equal(logits(model, batch))
    assert len(hfpatch.status(again).records) == len(hfpatch.status(model).records)


@pytest.mark.slow
def test_experts_and_branches_with_a_batch(tmp_path: Path) -> None:
    batch = {"input_ids": torch.arange(24)[None] % 50}
    model = tiny_model("mixtral")
    branch_overflow(model, batch)
    model = model.half()
    fix = hfpatch.apply(model, batch=batch, verbose=False)
    assert {"branch scale", "map scale"} <= {e.slot for e in fix.edits}
    model.save_pretrained(tmp_path)
    fix.save(tmp_path)
    again = hfpatch.load(tmp_path, verbose=False)
    assert logits(again, batch).equal(logits(model, batch))
    assert logits(again, batch).isfinite().all()
    assert not logits(loaded(tmp_path), batch).isfinite().all()


@pytest.mark.slow
def test_on_the_command_line(folder: Path, here: Any) -> None:
    shown = here("inspect", folder)
    assert "Manifest hfpatch.json of a LlamaForCausalLM" in shown.text
    assert "hfpatch.load(DIR), or hfpatch.apply(model, manifest=DIR)" in shown.text
    figures = here("inspect", folder, "--json").figures["manifest"]
    assert figures["again"] == [STREAM, HEAD]
    planned = here("plan", folder)
    assert f"a manifest lies beside the weights; hfpatch.load(DIR) applies {STREAM}, {HEAD} again" in planned.stderr
    (folder / FILE).unlink()
    assert here("inspect", folder, "--json").figures["manifest"] is None
    os.mkfifo(folder / FILE)
    for verb in ("inspect", "plan"):
        assert "hfpatch.json cannot be used: it is not an ordinary file" in here(verb, folder, code=2).sentence
