"""Every verb on a model of each quantiser: what is said is true, and the model is as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainingArguments

import hfpatch
from hfpatch.compat.quantising.quantised import coded, packed_by_a_run, saved_names
from hfpatch.errors import HfpatchError, InputError, RefusedError
from tests.quantised import ALL, BATCH, QUANTISED, dequantised, documented, llama, run, unpacked

pytestmark = pytest.mark.thorough
LABELLED = {**BATCH, "labels": BATCH["input_ids"]}
WEIGHTS = 82_240
"""Of the Llama, counted before it was quantised."""
CODED = 73_728


def step(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients of a training step."""
    model.zero_grad()
    there = model.get_input_embeddings()
    embeds = there(BATCH["input_ids"]).detach().requires_grad_()
    out = model(inputs_embeds=embeds, labels=LABELLED["labels"])
    out.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return out.logits.detach(), {"embeds": embeds.grad.clone(), **found}


def cast_by_its_library(model: Any) -> bool:
    """True for hqq, whose own door casts rotary tables, as `.half()` does."""
    return next(b for name, b in model.named_buffers() if name.endswith("inv_freq")).dtype == torch.float16


def inspect(model: Any) -> None:
    found = hfpatch.inspect(model)
    assert found.parameters == WEIGHTS, found.dtypes
    packed = {kind: count for kind, count in found.dtypes.items() if kind != "float16"}
    assert sum(packed.values()) == CODED and not {"uint8", "int8"} & set(packed), found.dtypes
    assert next(iter(packed)).startswith(f"{found.quantization} ".replace("gguf", "GGUF"))


def measured_plan(model: Any) -> None:
    """The largest values are those of the model with unpacked weights."""
    mine, true = (hfpatch.plan(m, batch=BATCH) for m in (model, dequantised(model).half()))
    one, other = (next(d for d in p.decisions if d.patch == "fp16-residual-overflow") for p in (mine, true))
    assert one.decided == other.decided == "applied"
    reached = [float(d.reason.partition("reaches ")[2].partition(" in")[0]) for d in (one, other)]
    assert reached[0] == pytest.approx(reached[1], rel=0.02), (one.reason, other.reason)


def applied(model: Any) -> None:
    fix = hfpatch.apply(model, verbose=False)
    status = hfpatch.status(model)
    assert fix.edits and not status.lapsed and len(status.edits) == len(fix.edits)
    hfpatch.revert(model)
    assert not hfpatch.status(model).edits


def verify(model: Any) -> None:
    """The reference is the model in float32 with unpacked weights."""
    with hfpatch.apply(model, verbose=False) as fix:
        proof = fix.verify(BATCH)
    with torch.no_grad():
        exact = dequantised(model)(**LABELLED).loss
    assert proof.reference.loss == pytest.approx(float(exact), abs=2e-6), proof
    assert any("unpacked to float32 in the reference" in note for note in proof.notes), proof.notes
    assert not any("casts to half precision" in note for note in proof.notes), proof.notes


def trace(model: Any) -> None:
    with hfpatch.trace(model) as found:
        model(**LABELLED)
    said = found.first_bad
    assert said is None or (cast_by_its_library(model) and said.symptom == "cast-buffer")
    assert "0 of 44 tensors overflow" in str(found.headroom("float16")), found.headroom("float16")


def adapted(model: Any) -> Any:
    """With LoRA as hfpatch advises it; GGUF's layers are none that PEFT adapts, and the head stands in for them."""
    torch.manual_seed(0)
    model.requires_grad_(False)
    if "GgufLinear" in {type(m).__name__ for m in model.modules()}:
        with pytest.raises(InputError, match="the installed PEFT has no layer for GgufLinear"):
            hfpatch.lora_config(model, r=4)
        return get_peft_model(model, LoraConfig(r=4, target_modules=["lm_head"]))
    return get_peft_model(model, hfpatch.lora_config(model, r=4))


def check(model: Any) -> None:
    trained = adapted(model)
    args = TrainingArguments(output_dir="unused", fp16=True, learning_rate=1e-3, report_to=[])
    report = hfpatch.check(trained, args, batch=LABELLED)
    assert "quantised-fp16" in report.ids, report
    assert {h.id for h in report.hazards if h.certain} == ({"buffers-cast"} if cast_by_its_library(model) else set())
    trained.unload()


def compare(model: Any) -> None:
    found = hfpatch.compare(model, dequantised(model).to(torch.float16), BATCH)
    packed = [w for w in found.weights if w.a.split(" ")[0] not in ("float16", "float32")]
    assert len(packed) == 14, [w.a for w in found.weights]
    assert {w.state for w in packed} <= {"equal", "rounded", "differs"}, packed
    assert all(w.distance < 1e-3 for w in packed), packed


def doctor(model: Any) -> None:
    page = hfpatch.doctor(model, batch=LABELLED)
    with torch.no_grad():
        exact = float(dequantised(model)(**LABELLED).loss)
    assert page.to_dict()["ways"][0]["loss"] == pytest.approx(exact, abs=2e-6)


def lora_targets(model: Any) -> None:
    if "GgufLinear" in {type(m).__name__ for m in model.modules()}:
        with pytest.raises(InputError, match="the installed PEFT has no layer for GgufLinear"):
            hfpatch.lora_targets(model)
        return
    found = hfpatch.lora_targets(model)
    assert len(found.target_modules) == 7 and found.coverage.weights == found.coverage.of_weights == CODED, found


VERBS: dict[str, Callable[[Any], None]] = {
    "inspect": inspect,
    "plan": measured_plan,
    "apply": applied,
    "verify": verify,
    "trace": trace,
    "check": check,
    "compare": compare,
    "doctor": doctor,
    "lora_targets": lora_targets,
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", QUANTISED)
def test_a_verb_says_what_is_true_and_leaves_the_model_as_it_was(kind: str, verb: str) -> None:
    model, fresh = (QUANTISED[kind](llama()) for _ in range(2))
    VERBS[verb](model)
    logits, grads = step(model.train())
    wanted, theirs = step(fresh.train())
    assert torch.equal(logits, wanted), f"outputs differ by {(logits - wanted).abs().max():.1e}"
    for name, gradient in grads.items():
        assert torch.equal(gradient, theirs[name]), name


@pytest.mark.parametrize("kind", QUANTISED)
def test_adapters_on_a_quantised_base_train_as_without_hfpatch(kind: str) -> None:
    """Each verb on a model with adapters, then guarded steps that lower the loss."""
    losses: list[list[float]] = []
    for looked_at in (True, False):
        model = adapted(QUANTISED[kind](llama()))
        if looked_at:
            with hfpatch.apply(model, verbose=False) as fix:
                assert fix.verify(BATCH).reference.finite
            hfpatch.check(model, batch=LABELLED)
            assert hfpatch.inspect(model).adapters
            assert not hfpatch.status(model).edits
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
        guard = hfpatch.Guard(model, optimizer)
        losses.append([])
        for _ in range(4):
            optimizer.zero_grad()
            loss = model.train()(**LABELLED).loss
            if looked_at:
                assert guard.step(loss).stepped
            else:
                loss.backward()
                optimizer.step()
            losses[-1].append(float(loss))
    assert losses[0] == pytest.approx(losses[1], abs=1e-5), losses
    assert losses[0][-1] < losses[0][0] - 0.05, losses


@pytest.mark.parametrize("kind", QUANTISED)
def test_what_a_library_saves_is_scanned_loaded_and_has_its_manifest(kind: str, tmp_path: Path) -> None:
    model = QUANTISED[kind](llama())
    fix = hfpatch.apply(model, verbose=False)
    fix.save(tmp_path)
    if kind.startswith("quanto"):
        with pytest.raises(ValueError, match="not serializable"):  # what transformers says
            model.save_pretrained(tmp_path)
        return
    model.save_pretrained(tmp_path)
    report = hfpatch.scan(tmp_path)
    assert not report.findings
    if model.config.to_dict().get("quantization_config"):
        assert report.quantised and "what they stand for was not looked at" in " ".join(str(report).split())
    assert "LoRA" not in str(report), report
    if not kind.startswith(("bitsandbytes", "torchao")):  # transformers does not load it as what it was
        with pytest.raises(HfpatchError):
            hfpatch.load(tmp_path)
        return
    again = hfpatch.load(tmp_path)
    assert hfpatch.status(again).patches == hfpatch.status(model).patches
    with torch.no_grad():
        assert torch.equal(again(**BATCH).logits, model(**BATCH).logits)


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_manifest_is_replayed_on_the_same_model_quantised_anew(kind: str, tmp_path: Path) -> None:
    model = QUANTISED[kind](llama())
    hfpatch.apply(model, verbose=False).save(tmp_path)
    twin = QUANTISED[kind](llama())
    hfpatch.apply(twin, manifest=tmp_path, verbose=False)
    with torch.no_grad():
        assert torch.equal(twin(**BATCH).logits, model(**BATCH).logits)
    other = llama()
    with torch.no_grad():
        other.model.layers[1].self_attn.v_proj.weight.neg_()
    with pytest.raises(RefusedError, match=r"v_proj\S* has other values"):
        hfpatch.apply(QUANTISED[kind](other), manifest=tmp_path, verbose=False)


@pytest.mark.parametrize("place", ALL, ids=" - ".join)
def test_every_cell_is_as_documented(place: tuple[str, str, str]) -> None:
    assert run(*place).outcome == documented()[place] != "FAILS"


@pytest.mark.parametrize("kind", QUANTISED)
def test_values_are_those_that_the_library_unpacks(kind: str) -> None:
    """Also after a run in evaluation, in which bitsandbytes packs 4-bit weights anew on some CPUs."""
    model = QUANTISED[kind](llama())
    library = {path: value for path, m in model.named_modules() if (value := unpacked(m)) is not None}
    with torch.no_grad():
        model(**BATCH)
    ours = {path: found for path, m in model.named_modules() if (found := coded(m)) is not None}
    assert set(ours) == set(library) and len(ours) == 14
    anew = any(packed_by_a_run(m) for m in model.modules())
    for path, found in ours.items():
        mine, theirs = found.values().detach().float(), library[path].detach().float()
        assert found.shape == theirs.shape and found.kind.startswith(kind.split(" ", maxsplit=1)[0])
        off = float((mine - theirs).norm() / theirs.norm())
        assert off < (4e-3 if anew or kind == "torchao int8" else 1e-6), f"{path}: {off}"


def test_a_format_that_can_only_multiply_has_its_values_and_its_reference() -> None:
    """As torchao's int4 for GPUs; this one runs on a CPU."""
    from torchao.prototype.quantization.int4 import Int4OpaqueTensor

    model = llama(torch.bfloat16)
    for layer in model.model.layers:
        weight = Int4OpaqueTensor.from_hp(layer.mlp.down_proj.weight.detach(), [1, 32])
        layer.mlp.down_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(NotImplementedError):
        weight.dequantize()
    found = coded(model.model.layers[-1].mlp.down_proj)
    assert found is not None and found.shape == (64, 128)
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    wanted = model.model.layers[-1].mlp.down_proj(x)
    assert torch.allclose(x.float() @ found.values().float().T, wanted.float(), atol=1e-2)
    proof = hfpatch.verify(model, BATCH)
    assert proof.reference.finite and proof.rows[0].kl < 1e-3
    assert hfpatch.inspect(model).parameters == WEIGHTS


def test_an_evaluation_that_spoils_gradients_is_named() -> None:
    """bitsandbytes 0.50 on a CPU with AVX512-BF16; elsewhere it packs nothing, and nothing is said."""
    model = QUANTISED["bitsandbytes nf4"](llama())
    _, before = step(model.train())
    with torch.no_grad():
        logits = model.eval()(**BATCH).logits
    _, after = step(model.train())
    off = float((after["embeds"] - before["embeds"]).norm() / before["embeds"].norm())
    found = [h for h in hfpatch.check(model).hazards if h.id == "packed-for-cpu"]
    assert bool(found) is (off > 0.1), (off, found)
    saved_names(model)
    with torch.no_grad():
        assert torch.equal(model.eval()(**BATCH).logits, logits), "looking at the names of a state dict changed it"
