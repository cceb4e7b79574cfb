"""The model is the truth: what status, plan, apply and revert say and do where records and model part."""

from __future__ import annotations

import copy
import gzip
import io
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

import hfpatch
from hfpatch.compat import hooks as tables
from hfpatch.lab.tiny import COMPOSITES, SpeechLLM, tiny_model
from hfpatch.patching.record import Record, records_of
from hfpatch.patching.writing import suspended
from tests.fingerprint import fingerprint
from tests.processes import python

DATA = Path(__file__).parent / "data"
FP16 = "fp16-residual-overflow"


def clear_hooks(model: nn.Module) -> None:
    for module in model.modules():
        for table in tables.tables(module):
            table.clear()


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits.float()


def words(model: nn.Module, patch: str) -> set[str]:
    return {e.state.word for e in hfpatch.status(model).edits if e.record.patch == patch}


class TestHooks:
    def test_hooks_that_are_gone_are_said_and_set_again(self, gemma: Any, ids: torch.Tensor) -> None:
        fix = hfpatch.apply(gemma, only=FP16, verbose=False)
        good = logits(gemma, ids)
        clear_hooks(gemma)
        status = hfpatch.status(gemma)
        assert not status
        assert status.patches == ()
        assert words(gemma, FP16) == {"gone"}
        assert "18 of its edits are gone: input dtype of model.layers.0 is without its hook" in " ".join(
            str(status).split()
        )
        assert status.to_dict()["edits"][0]["state"] == "gone"
        (made,) = (d for d in hfpatch.plan(gemma).decisions if d.patch == FP16)
        assert (made.decided, len(made.edits), made.worst) == ("applied", 18, True)
        assert made.lapsed.startswith(f"{FP16} was applied before and 18 of its edits are gone, first input dtype of")
        again = hfpatch.apply(gemma, only=FP16, verbose=False)
        assert torch.equal(logits(gemma, ids), good)
        assert len(hfpatch.status(gemma).edits) == 18
        assert fix.status().edits == ()
        again.revert()
        assert not logits(gemma, ids).isfinite().all()

    def test_one_that_is_gone_is_one(self, gemma: Any, ids: torch.Tensor) -> None:
        before = fingerprint(gemma)
        hfpatch.apply(gemma, only=FP16, verbose=False)
        good = logits(gemma, ids)
        layer = gemma.model.layers[1].mlp
        layer._forward_pre_hooks.clear()
        layer._forward_pre_hooks_with_kwargs.clear()
        row = next(line for line in str(hfpatch.status(gemma)).splitlines() if line.startswith(FP16))
        assert "1 gone, 17 here" in row
        made = hfpatch.plan(gemma, only=FP16)
        assert [e.path for e in made.edits] == ["model.layers.1.mlp"]
        hfpatch.apply(gemma, only=FP16, verbose=False)
        assert torch.equal(logits(gemma, ids), good)
        hfpatch.revert(gemma)
        assert fingerprint(gemma) == before

    def test_what_is_gone_comes_first_in_what_apply_says(self, gemma: Any, capsys: Any) -> None:
        hfpatch.apply(gemma, only=FP16, verbose=False)
        clear_hooks(gemma)
        hfpatch.apply(gemma, only=FP16)
        first = capsys.readouterr().err.splitlines()[0]
        assert first.startswith(f"hfpatch: {FP16} was applied before and 18 of its edits are gone")

    def test_a_hook_of_the_users_own_survives_everything(self, gemma: Any) -> None:
        called: list[int] = []
        for module in gemma.modules():
            module.register_forward_pre_hook(lambda *_: called.append(1))
        before = fingerprint(gemma)
        fix = hfpatch.apply(gemma, only=FP16, verbose=False)
        fix.revert()
        assert fingerprint(gemma) == before

    def test_the_layer_a_cast_follows_is_replaced(self, gemma: Any, ids: torch.Tensor) -> None:
        class Around(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.inner(x)

        hfpatch.apply(gemma, only=FP16, verbose=False)
        good = logits(gemma, ids)
        for layer in gemma.model.layers:
            layer.self_attn.q_proj = Around(layer.self_attn.q_proj)
            layer.mlp.gate_proj = Around(layer.mlp.gate_proj)
        assert torch.equal(logits(gemma, ids), good)

    def test_hooks_cleared_without_their_flags_leave_none(self, gemma: Any) -> None:
        before = fingerprint(gemma)
        hfpatch.apply(gemma, only=FP16, verbose=False)
        for module in gemma.modules():
            module._forward_pre_hooks.clear()
            module._forward_hooks.clear()
        assert words(gemma, FP16) == {"gone"}
        hfpatch.apply(gemma, only=FP16, verbose=False)
        hfpatch.revert(gemma)
        assert fingerprint(gemma) == before

    def test_registered_again_otherwise_is_gone(self, gemma: Any, ids: torch.Tensor) -> None:
        """Somebody keeps the hooks and registers them without their keyword arguments: then they do nothing."""
        before = fingerprint(gemma)
        hfpatch.apply(gemma, only=FP16, verbose=False)
        good = logits(gemma, ids)
        layer = gemma.model.layers[0]
        kept = list(layer._forward_pre_hooks.values())
        layer._forward_pre_hooks.clear()
        for hook in kept:
            layer.register_forward_pre_hook(hook)
        assert [e.path for e in hfpatch.status(gemma).lapsed] == ["model.layers.0"]
        hfpatch.apply(gemma, only=FP16, verbose=False)
        assert torch.equal(logits(gemma, ids), good)
        hfpatch.revert(gemma)
        assert fingerprint(gemma) == before

    @pytest.mark.parametrize("action", ["revert", "apply"])
    def test_a_call_during_which_hooks_come_or_go(self, gemma: Any, ids: torch.Tensor, action: str) -> None:
        """torch has listed a module's hooks already when another thread, or a hook, takes them off."""
        fix = hfpatch.apply(gemma, only=FP16, verbose=False)
        done: list[int] = []

        def during(*_: Any) -> None:
            if not done:
                done.append(1)
                fix.revert()
                if action == "apply":
                    hfpatch.apply(gemma, only=FP16, verbose=False)

        gemma.model.layers[0].register_forward_pre_hook(during, prepend=True)
        logits(gemma, ids)
        assert bool(hfpatch.status(gemma)) == (action == "apply")

    def test_the_order_of_hooks_stays_when_they_are_suspended(self, gemma: Any, ids: torch.Tensor) -> None:
        fix = hfpatch.apply(gemma, only=FP16, verbose=False)
        gemma.model.norm.register_forward_hook(lambda *_: None)
        before = fingerprint(gemma)
        fix.verify({"input_ids": ids})
        assert fingerprint(gemma) == before


class TestAttributes:
    def test_changed_by_somebody(self, tiny: Any, capsys: Any) -> None:
        model = SpeechLLM(tiny("gemma3_text"))
        fix = hfpatch.apply(model, verbose=False)
        model.ln_speech.eps = 1e-3
        assert words(model, "eps-alignment") == {"changed"}
        assert "eps of ln_speech is 0.001" in " ".join(str(hfpatch.status(model)).split())
        (offered,) = (d for d in hfpatch.plan(model).decisions if d.patch == "eps-alignment")
        assert (offered.decided, offered.worst) == ("opt-in", True)
        assert hfpatch.plan(model, include="eps-alignment").edits[0].after == 1e-6
        fix.revert()
        assert "not reverted: ln_speech: eps is 0.001; eps-alignment had set it to 1e-06" in capsys.readouterr().err
        assert model.ln_speech.eps == 1e-3
        assert "get_input_embeddings" not in model.__dict__  # everything else went
        assert hfpatch.status(model).patches == ()
        hfpatch.revert(model, only="eps-alignment")
        assert model.ln_speech.eps == 1e-4
        assert not hfpatch.status(model).edits

    def test_set_again_by_name_and_reverted_to_what_was_first(self, tiny: Any) -> None:
        model = SpeechLLM(tiny("gemma3_text"))
        before = fingerprint(model)
        hfpatch.apply(model, only="eps-alignment", verbose=False)
        model.ln_speech.eps = 1e-3
        assert hfpatch.apply(model, verbose=False, exclude=["projection-init", "embed-*"]).edits == ()
        hfpatch.apply(model, include="eps-alignment", verbose=False, exclude=["projection-init", "embed-*"])
        assert model.ln_speech.eps == 1e-6
        hfpatch.revert(model)
        assert fingerprint(model) == before

    @pytest.mark.parametrize("value", [torch.tensor([1e-3, 2e-3]), torch.tensor(1e-6), None, "small"])
    def test_set_to_something_odd(self, tiny: Any, capsys: Any, value: object) -> None:
        model = SpeechLLM(tiny("gemma3_text"))
        fix = hfpatch.apply(model, only="eps-alignment", verbose=False)
        model.ln_speech.eps = value
        assert words(model, "eps-alignment") == {"changed"}
        fix.revert()
        assert "hfpatch: not reverted: ln_speech: eps is " in capsys.readouterr().err
        assert model.ln_speech.eps is value
        hfpatch.revert(model, only="eps-alignment")
        assert model.ln_speech.eps == 1e-4

    def test_deleted_is_gone_and_given_back(self, tiny: Any) -> None:
        model = SpeechLLM(tiny("gemma3_text"))
        hfpatch.apply(model, only="eps-alignment", verbose=False)
        del model.ln_speech.eps
        assert "one of its edits is gone: eps of ln_speech is not there: " in " ".join(
            str(hfpatch.status(model)).split()
        )
        hfpatch.revert(model)
        assert model.ln_speech.eps == 1e-4

    def test_put_back_by_hand_is_gone(self, tiny: Any) -> None:
        model = SpeechLLM(tiny("gemma3_text"))
        hfpatch.apply(model, verbose=False)
        model.ln_speech.eps = 1e-4
        del model.__dict__["get_input_embeddings"]
        assert words(model, "eps-alignment") == words(model, "embed-token-resolver") == {"gone"}
        hfpatch.apply(model, verbose=False)
        assert model.ln_speech.eps == 1e-6
        assert set(hfpatch.status(model).patches) >= {"eps-alignment", "embed-token-resolver"}


class TestAttention:
    def test_chosen_anew_by_the_user(self, tiny: Any) -> None:
        model = tiny("llama").half()
        model.config._attn_implementation = "eager"
        hfpatch.apply(model, only="fp32-attention-logits", verbose=False)
        model.set_attn_implementation("sdpa")
        assert words(model, "fp32-attention-logits") == {"changed"}
        assert "attention of the model itself is sdpa" in " ".join(str(hfpatch.status(model)).split())
        hfpatch.revert(model)
        assert model.config._attn_implementation == "sdpa"
        model.set_attn_implementation("eager")
        assert words(model, "fp32-attention-logits") == {"gone"}
        hfpatch.revert(model)
        assert not hfpatch.status(model).edits

    def test_a_save_is_no_change_of_the_config(self, tiny: Any, tmp_path: Path) -> None:
        model = tiny("llama").half()
        model.config._attn_implementation = "eager"
        config = model.config
        fix = hfpatch.apply(model, only="fp32-attention-logits", verbose=False)
        model.save_pretrained(tmp_path)
        fix.revert()
        assert model.config is config
        assert model.model.config is config

    @pytest.mark.parametrize("first", ["vision_tower", "language_model"])
    def test_two_submodels_of_one_config_at_two_times_in_any_order(self, first: str) -> None:
        """The second edit copies the copies of the first, and outlives it."""
        model: Any = tiny_model("llava").half()
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation_internal = "eager"
        parts = {name: model.model.get_submodule(name) for name in ("vision_tower", "language_model")}
        (second,) = set(parts) - {first}
        configs = {name: (m, m.config) for name, m in model.named_modules() if hasattr(m, "config")}
        parts[second].float()
        fixes = [hfpatch.apply(model, exclude=["projection-init", "fp32-buffers", FP16], verbose=False)]
        parts[second].half()
        fixes.append(hfpatch.apply(model, exclude=["projection-init", "fp32-buffers", FP16], verbose=False))
        assert [[e.path for e in fix.edits] for fix in fixes] == [[f"model.{first}"], [f"model.{second}"]]
        copies = [copy.deepcopy(model) for _ in range(2)]
        held = fingerprint(model)
        for fix in fixes:
            with suspended(model, fix.log()):
                chosen = {name: part.config._attn_implementation for name, part in parts.items()}
                assert chosen.pop(first if fix is fixes[0] else second) == "eager"
                assert all(name.startswith("hfpatch_") for name in chosen.values())
            assert fingerprint(model) == held
        fixes[0].revert()
        assert parts[first].config._attn_implementation == "eager"
        assert parts[second].config._attn_implementation.startswith("hfpatch_")
        assert [(e.path, e.state.word) for e in hfpatch.status(model).edits] == [(f"model.{second}", "here")]
        fixes[1].revert()
        assert all(m.config is config for m, config in configs.values())
        assert {c._attn_implementation for _, c in configs.values()} == {"eager"}
        hfpatch.revert(copies[0])
        for name in (first, second):
            hfpatch.revert(copies[1].model.get_submodule(name))
        for copied in copies:
            assert not hfpatch.status(copied).edits
            assert {m.config._attn_implementation for m in copied.modules() if hasattr(m, "config")} == {"eager"}
            assert copied.config.text_config._attn_implementation == "eager"

    def test_a_layer_from_before_is_seen_and_mended(self, tiny: Any, ids: torch.Tensor) -> None:
        model = tiny("llama").half()
        model.config._attn_implementation = "eager"
        older = copy.deepcopy(model.model.layers[0])
        hfpatch.apply(model, only="fp32-attention-logits", verbose=False)
        good = logits(model, ids)
        model.model.layers[0] = older
        (edit,) = hfpatch.status(model).edits
        assert (edit.state.word, edit.state.now) == ("gone", "eager in model.layers.0.self_attn")
        hfpatch.apply(model, only="fp32-attention-logits", verbose=False)
        assert torch.equal(logits(model, ids), good)
        assert words(model, "fp32-attention-logits") == {"here"}
        hfpatch.revert(model)
        assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {"eager"}


class TestTensors:
    def test_trained_is_told_on_request(self, tiny: Any) -> None:
        model = SpeechLLM(tiny("llama"))
        hfpatch.apply(model, only="projection-init", verbose=False)
        assert words(model, "projection-init") == {"here"}
        with torch.no_grad():
            model.speech_proj.weight.add_(1)
        assert words(model, "projection-init") == {"here"}
        told = {e.record.slot: e.state.word for e in hfpatch.status(model, compare=True).edits}
        assert told == {"tensor weight": "trained", "tensor bias": "here"}
        assert hfpatch.status(model, compare=True)

    @pytest.mark.parametrize("shared", [True, False])
    def test_memory_of_several_processes_is_said(
        self, tiny: Any, capsys: pytest.CaptureFixture[str], shared: bool
    ) -> None:
        model = SpeechLLM(tiny("llama"))
        if shared:
            model.share_memory()
        hfpatch.apply(model, only="projection-init", verbose=False)
        hfpatch.revert(model)
        assert ("the memory of weight is shared, so other processes" in capsys.readouterr().err) is shared
        assert not hfpatch.status(model).edits

    @pytest.mark.parametrize("meanwhile", [torch.float16, torch.bfloat16])
    def test_half_precision_and_back_is_no_training(self, tiny: Any, meanwhile: torch.dtype) -> None:
        model = SpeechLLM(tiny("llama"))
        before = fingerprint(model)
        fix = hfpatch.apply(model, only="projection-init", verbose=False)
        model.speech_proj.to(meanwhile)
        assert {e.state.word for e in hfpatch.status(model, compare=True).edits} == {"here"}
        model.speech_proj.float()
        assert {e.state.word for e in hfpatch.status(model, compare=True).edits} == {"here"}
        fix.revert()
        assert fingerprint(model) == before

    def test_a_tensor_of_another_shape_is_gone(self, tiny: Any, capsys: Any) -> None:
        model = SpeechLLM(tiny("llama"))
        hfpatch.apply(model, only="projection-init", verbose=False)
        model.speech_proj.weight = nn.Parameter(torch.zeros(5, 5))
        told = {e.record.slot: (e.state.word, e.state.now) for e in hfpatch.status(model).edits}
        assert told == {"tensor weight": ("gone", "of shape (5, 5)"), "tensor bias": ("here", "")}
        hfpatch.revert(model)
        assert capsys.readouterr().err == ""
        assert not hfpatch.status(model).edits
        assert torch.equal(model.speech_proj.weight, torch.zeros(5, 5))

    def test_a_parametrized_tensor_is_not_put_back_in_silence(self, tiny: Any, capsys: Any) -> None:
        from torch.nn.utils import parametrize

        class Half(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x / 2

            def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
                return x * 2

        model = SpeechLLM(tiny("llama"))
        was = model.speech_proj.weight.detach().clone()
        hfpatch.apply(model, only="projection-init", verbose=False)
        parametrize.register_parametrization(model.speech_proj, "weight", Half())
        told = {e.record.slot: e.state.word for e in hfpatch.status(model).edits}
        assert told == {"tensor weight": "changed", "tensor bias": "here"}
        hfpatch.revert(model)
        assert "not reverted: speech_proj: tensor weight is computed from other tensors" in capsys.readouterr().err
        with pytest.raises(hfpatch.errors.RevertError, match="it is computed from other tensors"):
            hfpatch.revert(model, only="projection-init")
        assert words(model, "projection-init") == {"changed"}
        parametrize.remove_parametrizations(model.speech_proj, "weight")
        hfpatch.revert(model)
        assert torch.equal(model.speech_proj.weight, was)
        assert not hfpatch.status(model).edits

    def test_other_embeddings_are_no_conflict_with_itself(self, tiny: Any) -> None:
        model = SpeechLLM(tiny("llama"))
        hfpatch.apply(model, only="projection-init", verbose=False)
        with torch.no_grad():
            model.llm.get_input_embeddings().weight.mul_(4)
        (found,) = hfpatch.plan(model, only="projection-init").decisions
        assert found.decided == "not needed"
        assert found.reason == "already applied (2 edits)"
        assert found.otherwise.startswith("tensor weight of speech_proj was set to normal(0, ")
        assert "would be set to normal(0, " in found.otherwise


def test_a_patch_for_another_dtype_is_no_conflict_with_itself(tiny: Any) -> None:
    """T5, planned for float16: `wo` follows its weights afterwards, which are float32 now."""
    model = tiny("t5")
    hfpatch.apply(model, verbose=False, compute_dtype="float16")
    for chosen in (None, "float16"):
        (found,) = (d for d in hfpatch.plan(model, compute_dtype=chosen).decisions if d.patch == "wo-overflow")
        assert found.decided == "not needed"
        assert found.reason.startswith("already applied (")
    assert hfpatch.apply(model, verbose=False).edits == ()
    hfpatch.revert(model)
    assert not hfpatch.status(model).edits


class TestAdapters:
    def test_another_adapter_of_the_same_name_keeps_its_targets(self, tiny: Any) -> None:
        from peft import LoraConfig

        model: Any = COMPOSITES["lora-qv"](tiny("llama"))
        fix = hfpatch.apply(model, only="lora-target-expansion", verbose=False)
        model.delete_adapter("default")
        assert words(model, "lora-target-expansion") == {"gone"}
        model.add_adapter("default", LoraConfig(r=2, target_modules=["k_proj"]))
        assert words(model, "lora-target-expansion") == {"gone"}
        before = {n for n, m in model.named_modules() if "default" in getattr(m, "lora_A", ()) and "k_proj" in n}
        fix.revert()
        assert model.peft_config["default"].target_modules == {"k_proj"}
        assert {n for n, m in model.named_modules() if "default" in getattr(m, "lora_A", ())} == before
        assert not hfpatch.status(model).edits

    def test_a_block_replaced_by_its_copy_is_reverted_too(self, tiny: Any, ids: torch.Tensor) -> None:
        model: Any = COMPOSITES["lora-qv"](tiny("llama"))
        stock = logits(model, ids)
        adapted = [n for n, m in model.named_modules() if "default" in getattr(m, "lora_A", ())]
        fix = hfpatch.apply(model, only="lora-target-expansion", verbose=False)
        layers = model.base_model.model.model.layers
        layers[0] = copy.deepcopy(layers[0])
        inside = {id(p) for p in model.parameters()}
        assert all(id(p) in inside for p in fix.new_parameters)
        assert words(model, "lora-target-expansion") == {"here"}
        layers[1] = copy.deepcopy(layers[1])
        layers[1].mlp.up_proj = layers[1].mlp.up_proj.base_layer
        (edit,) = hfpatch.status(model).edits
        assert (edit.state.word, "model.layers.1.mlp.up_proj" in edit.state.now) == ("gone", True)
        fix.revert()
        assert [n for n, m in model.named_modules() if "default" in getattr(m, "lora_A", ())] == adapted
        assert type(layers[0].mlp.up_proj) is nn.Linear
        assert torch.equal(logits(model, ids), stock)


def test_modules_that_peft_copied_count_once(tiny: Any) -> None:
    from peft import LoraConfig, get_peft_model

    model = SpeechLLM(tiny("gemma3_text"))
    fix = hfpatch.apply(model, only=["eps-alignment", "projection-init"], verbose=False)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["ln_speech", "speech_proj"]))
    assert sum(len(records_of(m)) for m in wrapped.modules()) == 2 * len(fix.edits) == 6
    assert len(hfpatch.status(wrapped).edits) == 3
    hfpatch.revert(wrapped)
    assert {m.eps for name, m in wrapped.named_modules() if name.endswith(("original_module", "default")) and hasattr(
        m, "eps")} == {1e-4}  # fmt: skip
    assert not any(records_of(m) for m in wrapped.modules())


class Joined(nn.Module):
    """A composite that torch.compile takes whole."""

    def __init__(self, llm: nn.Module) -> None:
        super().__init__()
        self.llm = llm

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.llm(input_ids=input_ids).logits


class TestCompiledComposite:
    def test_written_read_and_restored_in_one_place(self, tiny: Any) -> None:
        torch._dynamo.reset()
        model = SpeechLLM(tiny("llama")).eval()
        compiled = torch.compile(model, backend="eager")
        before = fingerprint(model)
        fix = hfpatch.apply(compiled, verbose=False)
        assert "embed-token-resolver" in fix.status().patches
        assert compiled.get_input_embeddings() is model.llm.get_input_embeddings()
        assert hfpatch.apply(compiled, verbose=False).edits == ()
        fix.revert()
        assert fingerprint(model) == before
        with hfpatch.apply(compiled, verbose=False):
            assert hfpatch.status(model)
        assert fingerprint(model) == before

    def test_what_a_call_blocks_blocks_nothing_else(self, tiny: Any, ids: torch.Tensor) -> None:
        torch._dynamo.reset()
        model = Joined(tiny("gemma3_text")).half().eval()
        compiled = torch.compile(model, backend="eager")
        before = fingerprint(model)
        fix = hfpatch.apply(compiled, verbose=False)
        with torch.no_grad():
            compiled(ids)
        with pytest.raises(
            hfpatch.errors.RevertError, match=r"which does not affect the others: .*torch._dynamo.reset\(\) first"
        ):
            fix.revert()
        assert FP16 in hfpatch.status(model).patches
        assert "get_input_embeddings" not in model.__dict__
        torch._dynamo.reset()
        fix.revert()
        assert fingerprint(model) == before


def test_a_blocked_edit_blocks_no_other(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from hfpatch.patching.kinds.set_tensor import SetTensor

    model = SpeechLLM(tiny("gemma3_text"))
    fix = hfpatch.apply(model, verbose=False)

    def fail(*_: Any) -> None:
        raise RuntimeError("no way back")

    monkeypatch.setattr(SetTensor, "restore", fail)
    with pytest.raises(hfpatch.errors.RevertError, match=r"projection-init: tensor .* no way back"):
        fix.revert()
    assert model.ln_speech.eps == 1e-4
    monkeypatch.undo()
    hfpatch.revert(model)
    assert not hfpatch.status(model).edits


OTHER_PROCESS = """
    import sys, torch, transformers, hfpatch
    from torch.utils.hooks import RemovableHandle
    transformers.logging.set_verbosity_error()
    model = torch.load(sys.argv[1], weights_only=False)
    ids = torch.load(sys.argv[2])
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    for number in range(600):  # whatever number torch comes to, somebody's hooks come and go
        RemovableHandle.next_id = number
        for m in model.modules():
            m.register_forward_pre_hook(lambda *_: None).remove()
            RemovableHandle.next_id = number
            m.register_forward_hook(lambda *_: None).remove()
            RemovableHandle.next_id = number
        if number == 1:
            break
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    with torch.no_grad():
        loaded = model(input_ids=ids).logits
    status = hfpatch.status(model)
    assert all(e.state.word == "here" for e in status.edits), status
    assert hfpatch.apply(model, verbose=False, exclude=["lora-*"]).edits == ()
    RemovableHandle.next_id = 0
    with hfpatch.trace(model) as t, torch.no_grad():
        model(input_ids=ids)
    assert t.first_bad is None, t.report()
    hfpatch.revert(model)
    left = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    again = hfpatch.apply(model, verbose=False, include="suggested")
    torch.save({"loaded": loaded, "patches": status.patches, "edits": len(status.edits), "left": left}, sys.argv[3])
"""


def in_a_new_process(model: nn.Module, ids: torch.Tensor, folder: Path) -> dict[str, Any]:
    """Save a model, and let a new process load, run, trace, revert and patch it."""
    torch.save(model, folder / "model.pt")
    torch.save(ids, folder / "ids.pt")
    files = [str(folder / name) for name in ("model.pt", "ids.pt", "out.pt")]
    done = python("-c", textwrap.dedent(OTHER_PROCESS), *files)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "out.pt")


def test_a_patched_model_in_a_new_process(gemma: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    def own(*_: Any) -> None: ...

    fix = hfpatch.apply(gemma, verbose=False)
    found = in_a_new_process(gemma, ids, tmp_path)
    assert torch.equal(found["loaded"], gemma(input_ids=ids).logits)
    assert (found["edits"], found["left"]) == (len(fix.edits), 0)
    assert set(found["patches"]) == {d.patch for d in fix.plan.of("applied")}


@pytest.mark.thorough
def test_a_modulated_model_in_a_new_process(tiny: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    model = COMPOSITES["modulated"](tiny("llama")).eval()
    fix = hfpatch.apply(model, verbose=False)
    assert fix.edits
    found = in_a_new_process(model, ids, tmp_path)
    assert torch.equal(found["loaded"], model(input_ids=ids).logits)
    assert found["edits"] == len(fix.edits)


PICKLED = {
    "speech": {"embed-token-resolver": 1, "eps-alignment": 1, "fp32-attention-logits": 1, FP16: 10},
    "adapters": {"lora-target-expansion": 1},
    "modulated": {"sigmoid-modulation": 2},
    "gpt2": {"fp32-attention-logits": 1, FP16: 11},
}
"""Models that release 0.1 patched and pickled, with the edits it said it made."""

PICKLED_LATER = {
    "speech-kinds": {
        "embed-token-resolver": 1, "eps-alignment": 1, "fp32-attention-logits": 1, FP16: 7, "projection-init": 2,
    },
    "adapters-kinds": {"lora-target-expansion": 1},
    "modulated-kinds": {"sigmoid-modulation": 1},
}  # fmt: skip
"""The same of a later state, whose records named the kind of edit and the slot too; every kind is in it."""


@pytest.mark.parametrize("name", sorted(PICKLED | PICKLED_LATER))
def test_models_pickled_by_earlier_versions_load_and_revert(name: str, ids: torch.Tensor) -> None:
    with gzip.open(DATA / f"{name}.pt.gz") as file:
        model: Any = torch.load(io.BytesIO(file.read()), weights_only=False)
    status, made = hfpatch.status(model), (PICKLED | PICKLED_LATER)[name]
    assert {p: sum(e.record.patch == p for e in status.edits) for p in status.patches} == made
    assert {e.state.word for e in status.edits} == {"here"}
    assert {type(e.record) for e in status.edits} == {Record}
    llm = getattr(model, "llm", model)
    with torch.no_grad():
        patched = llm(input_ids=ids).logits
    assert patched.isfinite().all()
    hfpatch.revert(model)
    assert not hfpatch.status(model).edits
    assert not any(records_of(m) for m in model.modules())
    hfpatch.apply(model, only=sorted(made), verbose=False)
    with torch.no_grad():
        assert torch.equal(llm(input_ids=ids).logits, patched)


def test_hooks_of_an_unpickled_model_are_not_taken_for_others(gemma: Any) -> None:
    """Release 0.1 numbered hooks as torch does: where a number was handed out again, the hook is gone, and is said."""
    with gzip.open(DATA / "gpt2.pt.gz") as file:
        model: Any = torch.load(io.BytesIO(file.read()), weights_only=False)
    layer = model.transformer.h[0]
    (number,) = layer._forward_pre_hooks
    RemovableHandle.next_id = number
    layer.register_forward_pre_hook(lambda *_: None)
    assert {e.path for e in hfpatch.status(model).lapsed} == {"transformer.h.0"}


def test_copies_are_asked_and_reverted_alone(gemma: Any) -> None:
    hfpatch.apply(gemma, verbose=False)
    copied = copy.deepcopy(gemma)
    clear_hooks(copied)
    assert hfpatch.status(gemma).lapsed == ()
    assert len(hfpatch.status(copied).lapsed) == 18


def test_a_plan_shows_what_apply_refuses(tiny: Any) -> None:
    model = tiny("gemma3n_text").half()
    (found,) = hfpatch.plan(model, only=FP16).decisions
    assert found.decided == "refused"
    with pytest.raises(
        hfpatch.errors.RefusedError,
        match=f"{FP16} was asked for and is refused: .*it does not cure a tiny gemma3n_text",
    ):
        hfpatch.apply(model, only=FP16)


def test_tiny_model_has_no_records() -> None:
    assert not hfpatch.status(tiny_model("llama")).edits
