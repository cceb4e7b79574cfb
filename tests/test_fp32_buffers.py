"""Cases 30 and 39: buffers that a cast rounded become those that the loader leaves, outputs those of a loaded model."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import hfpatch
from hfpatch.lab.example import example_inputs
from hfpatch.lab.tiny import SpeechLLM, tiny_config, tiny_model
from hfpatch.model.cast_buffers import cast_buffers
from hfpatch.model.survey import Survey
from tests.fingerprint import fingerprint
from tests.sampling import first_quick, slow
from tests.test_verify import Composite

ID = "fp32-buffers"
IDS = (torch.arange(128).reshape(2, 64) * 7 + 3) % 64

CASTS: dict[str, Any] = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "to": lambda m: m.to(torch.bfloat16),
    "through bfloat16": lambda m: m.bfloat16().half(),
    "back": lambda m: m.half().float(),
}


def given(model: Any, dtype: torch.dtype) -> dict[str, Any]:
    """An example batch; text of 64 tokens where it is text alone, so that positions matter."""
    batch = example_inputs(model)
    if set(batch) <= {"input_ids", "attention_mask", "labels"}:
        batch = {"input_ids": IDS, "labels": IDS}
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


def outputs(model: Any, batch: dict[str, Any]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [v.clone() for v in model(**batch).values() if isinstance(v, torch.Tensor)]


def loaded(model: Any, directory: Path, dtype: torch.dtype) -> Any:
    """The same weights, saved and loaded with dtype=."""
    model.save_pretrained(directory)
    return type(model).from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


def decided(model: nn.Module, **words: Any) -> Any:
    (decision,) = hfpatch.plan(model, only=ID, **words).decisions
    return decision


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("llama", "half"),
        ("llama", "back"),
        ("qwen3", "to"),
        ("gemma3_text", "bfloat16"),
        ("gemma3_text", "through bfloat16"),
        slow("gemma3", "bfloat16"),
        slow("qwen2_vl", "bfloat16"),
        slow("deepseek_v3", "bfloat16"),
        slow("falcon_h1", "bfloat16"),
        slow("cohere", "half"),
        slow("recurrent_gemma", "bfloat16"),
    ],
)
def test_outputs_are_those_of_a_loaded_model(name: str, how: str, tmp_path: Path) -> None:
    """To the bit, towers too; not before. A loaded one needs nothing, and revert gives back what was there."""
    model: Any = CASTS[how](tiny_model(name))
    dtype = next(model.parameters()).dtype
    batch, true = given(model, dtype), loaded(model, tmp_path, dtype)
    before = {path: part["buffers"] for path, part in fingerprint(model).items()}
    assert not same(outputs(model, batch), outputs(true, batch))
    assert decided(true).decided == "not needed"

    fix = hfpatch.apply(model, verbose=False, only=ID)
    assert {d.effect for d in fix.plan.decisions} == {"equivalent"}
    assert same(outputs(model, batch), outputs(true, batch))
    for (path, mine), (_, theirs) in zip(model.named_buffers(), true.named_buffers(), strict=True):
        stored = path in model.state_dict()
        assert stored or (mine.dtype, torch.equal(mine, theirs)) == (theirs.dtype, True)
    assert decided(model).decided == "not needed"
    assert not [h for h in hfpatch.inspect(model).hazards if "a cast rounded" in h]
    fix.revert()
    assert {path: part["buffers"] for path, part in fingerprint(model).items()} == before


@pytest.mark.parametrize(
    "name", first_quick(["gptj", "gpt_neox", "bloom", "mpt", "whisper", "m2m_100", "gemma3_text", "ctrl"], every=4)
)
def test_a_bare_apply_gives_a_loaded_model(name: str, tmp_path: Path) -> None:
    """Also where nothing with an effect was lost: alibi is computed at each call, sinusoids are weights."""
    model: Any = tiny_model(name).bfloat16()
    batch = given(model, torch.bfloat16)
    true = outputs(loaded(model, tmp_path, torch.bfloat16), batch)
    fix = hfpatch.apply(model, verbose=False)
    assert {e.slot.split()[0] for e in fix.edits} <= {"buffer", "copy"}
    assert same(outputs(model, batch), true)


def test_what_is_said(capsys: Any) -> None:
    model = tiny_model("llama").bfloat16()
    batch = {"input_ids": IDS, "labels": IDS}
    (hazard,) = hfpatch.inspect(model).hazards
    assert hazard.startswith("a cast rounded 2 buffers: model.rotary_emb.inv_freq (off by 9.8e-05 of its size)")
    (found,) = [h for h in hfpatch.check(model, {"bf16": True}).hazards if h.id == "buffers-cast"]
    assert ID in found.change
    with hfpatch.trace(model) as t:
        model(**batch)
    assert t.first_bad is not None
    assert t.first_bad.symptom == "cast-buffer"
    assert t.advice == (f"tried on this call: gone: hfpatch.apply(model, only=['{ID}'])",)
    fix = hfpatch.apply(model)
    assert f"{ID} applied (equivalent): 2 edits" in capsys.readouterr().err
    proof = fix.verify(batch)
    assert proof["after"].kl == proof["as loaded with dtype="].kl != proof["before"].kl
    assert not hfpatch.check(model, {"bf16": True}).hazards
    with hfpatch.trace(model) as t:
        model(**batch)
    assert t.first_bad is None


def test_the_reference_of_verify_is_not_rounded_after_the_patch() -> None:
    """The patch is suspended for the reference, which then has the rounded buffers: they are rebuilt there."""
    model = tiny_model("qwen3").bfloat16()
    batch = {"input_ids": IDS, "labels": IDS}
    stock = hfpatch.verify(model, batch, runs="as it is")
    after = hfpatch.apply(model, only=ID, verbose=False).verify(batch, runs="before")
    assert (after.reference.loss, after["before"].kl) == (stock.reference.loss, stock["as it is"].kl)


class TestLife:
    def test_a_later_cast_is_said_and_undone_by_a_bare_apply(self) -> None:
        model = tiny_model("llama").bfloat16()
        exact = {n: b.clone() for n, b in tiny_model("llama").named_buffers()}
        hfpatch.apply(model, only=ID, verbose=False)
        for cast in (model.half, lambda: model.half().float().half()):
            cast()
            status = hfpatch.status(model)
            assert {(e.state.word, e.state.now) for e in status.edits} == {("gone", "rounded again, and float16 now")}
            hfpatch.apply(model, only=ID, verbose=False)
            assert all(torch.equal(b, exact[n]) for n, b in model.named_buffers())
        hfpatch.revert(model)
        assert {b.dtype for b in model.buffers()} == {torch.float16}

    def test_a_cast_to_float32_keeps_it(self) -> None:
        model = tiny_model("llama").bfloat16()
        hfpatch.apply(model, only=ID, verbose=False)
        assert {e.state.word for e in hfpatch.status(model.float()).edits} == {"here"}
        assert {e.state.word for e in hfpatch.status(model.double()).edits} == {"here"}

    def test_a_value_set_since_stays(self, capsys: Any) -> None:
        model: Any = tiny_model("llama").bfloat16()
        hfpatch.apply(model, only=ID, verbose=False)
        with torch.no_grad():
            model.model.rotary_emb.inv_freq.mul_(2)
        words = {e.record.slot: e.state.word for e in hfpatch.status(model).edits}
        assert words == {"buffer inv_freq": "changed", "buffer original_inv_freq": "here"}
        hfpatch.revert(model)
        assert "not reverted: model.rotary_emb: buffer inv_freq is at other values" in capsys.readouterr().err
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32

    def test_a_copy_and_a_pickle_have_it_and_lose_it_alone(self) -> None:
        model = tiny_model("llama").bfloat16()
        hfpatch.apply(model, only=ID, verbose=False)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
            assert {e.state.word for e in hfpatch.status(other).edits} == {"here"}
            hfpatch.revert(other)
            assert {b.dtype for b in other.buffers()} == {torch.bfloat16}
        assert {b.dtype for b in model.buffers()} == {torch.float32}

    def test_a_trainers_full_evaluation_casts_again(self, tmp_path: Path) -> None:
        from transformers import Trainer, TrainingArguments

        model: Any = tiny_model("llama").bfloat16()
        hfpatch.apply(model, only=ID, verbose=False)
        data = [{"input_ids": IDS[0], "labels": IDS[0]}] * 2
        words: Any = {"output_dir": str(tmp_path), "report_to": [], "use_cpu": True, "disable_tqdm": True}
        Trainer(model, TrainingArguments(bf16_full_eval=True, **words), eval_dataset=data).evaluate()  # type: ignore[arg-type]
        assert {e.state.word for e in hfpatch.status(model).edits} == {"gone"}
        hfpatch.apply(model, only=ID, verbose=False)
        assert {b.dtype for b in model.buffers()} == {torch.float32}

    def test_two_modules_that_share_a_buffer(self) -> None:
        model: Any = nn.ModuleDict({"a": tiny_model("llama"), "b": tiny_model("llama")}).bfloat16()
        model["b"].model.rotary_emb.inv_freq = model["a"].model.rotary_emb.inv_freq
        before = fingerprint(model)
        fix = hfpatch.apply(model, only=ID, verbose=False)
        assert len(fix.edits) == 4
        fix.revert()
        assert fingerprint(model) == before
        assert model["a"].model.rotary_emb.inv_freq is model["b"].model.rotary_emb.inv_freq

    def test_nothing_but_the_state_dict_is_saved(self) -> None:
        model: Any = tiny_model("deepseek_v3").bfloat16()
        before = {k: (v.dtype, v.clone()) for k, v in model.state_dict().items()}
        hfpatch.apply(model, only=ID, verbose=False)
        after = model.state_dict()
        assert list(after) == list(before)
        assert all(after[k].dtype == d and torch.equal(after[k], v) for k, (d, v) in before.items())

    def test_compiled(self) -> None:
        torch._dynamo.reset()
        model: Any = tiny_model("llama", num_hidden_layers=1).bfloat16()
        compiled: Any = torch.compile(model, backend="eager")
        with torch.no_grad():
            compiled(input_ids=IDS)
            hfpatch.apply(compiled, only=ID, verbose=False)
            assert torch.equal(compiled(input_ids=IDS).logits, model(input_ids=IDS).logits)
            hfpatch.revert(compiled)
            assert torch.equal(compiled(input_ids=IDS).logits, model(input_ids=IDS).logits)


class TestInside:
    @pytest.mark.parametrize("name", ["speech", "peft", "compiled peft"])
    def test_wrapped(self, name: str) -> None:
        from peft import LoraConfig, get_peft_model

        model: Any = tiny_model("llama")
        if name == "speech":
            model = SpeechLLM(model)
        else:
            model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]), autocast_adapter_dtype=False)
        model = model.bfloat16()
        inner = model.llm if name == "speech" else model.base_model.model
        if name == "compiled peft":
            model = torch.compile(model, backend="eager")
        fix = hfpatch.apply(model, only=ID, verbose=False)
        assert len(fix.edits) == 2
        exact = dict(tiny_model("llama").named_buffers())
        assert all(torch.equal(b, exact[n]) for n, b in inner.named_buffers())

    def test_a_table_of_your_own_is_left(self) -> None:
        """No loader says in which dtype its forward wants it."""
        model: Any = Composite(tiny_model("llama")).half()
        decision = decided(model)
        assert {e.path for e in decision.edits} == {"llm.model.rotary_emb"}
        assert "left: positions.table (its module is not transformers' own" in decision.reason


class TestLeft:
    def test_persistent_router_biases_are_named(self) -> None:
        reason = decided(tiny_model("deepseek_v3").bfloat16()).reason
        assert "left: model.layers.*.mlp.gate.e_score_correction_bias (in the state dict" in reason

    def test_a_table_that_was_set_is_named(self) -> None:
        model: Any = tiny_model("llama")
        with torch.no_grad():
            model.model.rotary_emb.inv_freq.mul_(0.5)
        model.half()
        before = model.model.rotary_emb.inv_freq.clone()
        fix = hfpatch.apply(model, only=ID, verbose=False)
        assert [e.slot for e in fix.edits] == ["buffer original_inv_freq"]
        assert "left: model.rotary_emb.inv_freq (it is not what its class computes" in fix.plan.decisions[0].reason
        assert torch.equal(model.model.rotary_emb.inv_freq, before)

    def test_a_dynamic_table_that_grew(self) -> None:
        scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        model: Any = tiny_model("llama", rope_parameters=scaled, max_position_embeddings=16)
        with torch.no_grad():
            model(input_ids=IDS)
        assert "left: model.rotary_emb.inv_freq" in decided(model.half()).reason

    def test_a_table_on_meta_is_named(self) -> None:
        model: Any = tiny_model("llama").half()
        model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.to("meta")
        decision = decided(model)
        assert [e.slot for e in decision.edits] == ["buffer original_inv_freq"]
        assert "left: model.rotary_emb.inv_freq (its values are not in this process" in decision.reason

    def test_a_table_that_the_loader_does_not_know_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As in a release in which it has another name: it was rounded, and no build tells what the loader leaves."""
        monkeypatch.setattr(PreTrainedModel, "_init_weights", lambda _self, _module: None)
        model = tiny_model("llama", rms_norm_eps=3e-6).half()  # of no other test: builds are kept by config
        decision = decided(model)
        assert decision.decided == "refused"
        assert "model.rotary_emb.inv_freq, model.rotary_emb.original_inv_freq (a new model of the" in decision.reason
        assert decided(tiny_model("llama", rms_norm_eps=3e-6)).decided == "not needed"

    def test_a_table_that_nothing_computes_is_not_said_to_be_set(self) -> None:
        model: Any = tiny_model("llama").half()
        model.drawn = nn.Linear(2, 2)
        model.drawn.register_buffer("table", torch.randn(4).half(), persistent=False)
        assert "left: drawn.table (neither a new model nor a new module" in decided(model).reason

    @pytest.mark.parametrize("buffers", [False, True])
    def test_offloaded(self, buffers: bool) -> None:
        """accelerate offloads no buffer that the state dict does not hold."""
        from accelerate import cpu_offload

        model: Any = tiny_model("llama").bfloat16()
        hfpatch.apply(true := copy.deepcopy(model), only=ID, verbose=False)
        cpu_offload(model, "cpu", offload_buffers=buffers)
        hfpatch.apply(model, only=ID, verbose=False)
        assert same(outputs(model, {"input_ids": IDS}), outputs(true, {"input_ids": IDS}))

    def test_what_is_on_meta_is_not_said_to_be_as_it_should(self) -> None:
        with torch.device("meta"):
            model: Any = tiny_model("llama").bfloat16()
        assert "its buffers are on meta, so nothing tells what they will hold" in decided(model).reason


class TestNeverWritten:
    @pytest.mark.parametrize("memory", [0.0, float("nan"), 1e30, -3e-41])
    def test_built_on_meta(self, memory: float) -> None:
        true: Any = tiny_model("llama")
        with torch.device("meta"):
            model: Any = type(true)(tiny_config("llama"))
        model.to_empty(device="cpu")
        for buffer in model.buffers():
            buffer.fill_(memory)  # what happens to be there
        model.load_state_dict(true.state_dict())
        model.set_attn_implementation("eager")
        decision = decided(model.eval())
        assert "never written (uninitialised memory)" in decision.reason
        hfpatch.apply(model, verbose=False)
        with torch.no_grad():
            assert torch.equal(model(input_ids=IDS).logits, true(input_ids=IDS).logits)
        assert not cast_buffers(Survey(model)).cast

    def test_what_other_tensors_left_there(self) -> None:
        model: Any = tiny_model("llama")
        with torch.no_grad():
            model.model.rotary_emb.inv_freq.copy_(torch.randn(4, generator=torch.Generator().manual_seed(0)))
        assert "never written" in decided(model).reason
        with torch.no_grad():
            model.model.rotary_emb.inv_freq.copy_(torch.tensor([1.0, 0.05, 0.002, 0.0001]))  # another base: on purpose
        assert decided(model).decided == "not needed"

    def test_verify_says_so(self) -> None:
        model: Any = tiny_model("llama")
        with torch.no_grad():
            model.model.rotary_emb.inv_freq.zero_()
        batch = {"input_ids": IDS, "labels": IDS}
        proof = hfpatch.verify(model, batch, runs="as it is")
        with torch.no_grad():
            assert proof.reference.loss == pytest.approx(float(tiny_model("llama")(**batch).loss), abs=1e-6)
        assert any("memory that was never written" in note for note in proof.notes)


class TestMoreThanTheLoader:
    @pytest.mark.parametrize("name", ["m2m_100", "xglm"])
    def test_sinusoids_only_by_name(self, name: str) -> None:
        """In float32 the embeddings and their sum are nearer to float32's; the loader rounds the table."""
        exact: Any = tiny_model(name)
        model: Any = copy.deepcopy(exact).bfloat16()
        batch = given(exact, torch.float32)
        first = "model.encoder.layers.0" if name == "m2m_100" else "model.layers.0"
        with torch.no_grad():
            for parameter in exact.parameters():
                parameter.copy_(parameter.bfloat16())
        decision = hfpatch.plan(model, include=["*"], exclude=[ID]).decisions
        assert ID not in {d.patch for d in decision if d.decided == "applied"}
        stock = hfpatch.apply(model, verbose=False)
        (row,) = [d for d in stock.plan.decisions if d.patch == ID]
        assert (row.decided, row.effect, row.suggested) == ("opt-in", "changes-function", False)

        def entering(m: Any) -> torch.Tensor:
            seen: list[torch.Tensor] = []
            handle = m.get_submodule(first).register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
            outputs(m, batch)
            handle.remove()
            return seen[0].float()

        want, before = entering(exact), entering(model)
        fix = hfpatch.apply(model, include=[ID], verbose=False)
        assert {e.change.slot.split()[0] for e in fix.edits} == {"buffer", "input"}
        after = entering(model)
        assert (after - want).norm() < 0.9 * (before - want).norm()
        fix.revert()
        assert torch.equal(entering(model), before)

    def test_a_scale_that_the_forward_rounds_again_is_not_needed(self, tmp_path: Path) -> None:
        model = loaded(tiny_model("gemma3_text"), tmp_path, torch.bfloat16)
        decision = decided(model)
        assert decision.decided == "not needed"
        assert "embed_scale (off by" in decision.reason
        assert "where float32 would change nothing" in decision.reason

    def test_float16_stays(self) -> None:
        assert "float32 there would widen the float16 stream" in decided(tiny_model("m2m_100").half()).reason
