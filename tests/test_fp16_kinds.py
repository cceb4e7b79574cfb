"""The float16 residual stream of other kinds of model: torch's norms, encoders beside decoders, T5's `wo`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import WhisperConfig, WhisperForConditionalGeneration

import hfpatch
from hfpatch.lab.example import example_inputs
from hfpatch.lab.overflow import overflow
from hfpatch.lab.tiny import rescale, tiny_model
from hfpatch.model.survey import Survey

TORCH_NORMS = ("gpt2", "falcon", "opt", "nemotron")
WIDE_OUT = {"*.wo.weight": 1e7}


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((got.float() - exact).norm() / exact.norm()).item())


def fix(model: nn.Module, **options: Any) -> hfpatch.Applied:
    only = "wo-overflow" if model.config.model_type == "t5" else "fp16-residual-overflow"
    return hfpatch.apply(model, verbose=False, only=only, **options)


SCALE = 256.0
"""Of the loss, so that float16 gradients do not vanish."""


def gradients(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (model(**batch).loss * SCALE).backward()
    return {n: p.grad.float() / SCALE for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(params=TORCH_NORMS)
def overflowing(request: pytest.FixtureRequest, ids: torch.Tensor) -> Any:
    """A model in float32 with weights that float16 holds and a stream that it does not."""
    model = tiny_model(request.param, num_hidden_layers=8)
    overflow(model, {"input_ids": ids})
    return model.half().float()


def test_gradients_through_a_torch_norm(overflowing: Any, ids: torch.Tensor) -> None:
    batch = {"input_ids": ids, "labels": ids}
    exact, stock = gradients(overflowing, batch), gradients(copy.deepcopy(overflowing).half(), batch)
    bfloat16 = gradients(copy.deepcopy(overflowing).bfloat16(), batch)
    model = copy.deepcopy(overflowing).half()
    fix(model)
    mine = gradients(model, batch)
    assert not all(g.isfinite().all() for g in stock.values())
    flat = {k: torch.cat([g[n].flatten() for n in exact]) for k, g in (("mine", mine), ("exact", exact))}
    other = torch.cat([bfloat16[n].flatten() for n in exact])
    assert error(flat["mine"], flat["exact"]) < error(other, flat["exact"])
    model.gradient_checkpointing_enable()
    model.train()
    again = gradients(model.eval(), batch)
    assert all(torch.equal(again[n], mine[n]) for n in mine)


def test_a_compiled_model_with_torch_norms(ids: torch.Tensor) -> None:
    model = tiny_model("gpt2", num_hidden_layers=2).half()
    fix(model)
    with torch.no_grad():
        eager = model(input_ids=ids).logits
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(input_ids=ids).logits
    torch._dynamo.reset()
    assert torch.equal(compiled, eager)


def test_a_norm_gives_plain_tensors_and_the_weights_stay(ids: torch.Tensor) -> None:
    model = tiny_model("gpt2").half()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    applied = fix(model)
    seen: list[torch.Tensor] = []
    model.transformer.h[1].ln_1.register_forward_hook(lambda _m, _a, out: seen.append(out))
    out = model(input_ids=ids, output_hidden_states=True)
    assert type(seen[0]) is torch.Tensor
    assert seen[0].dtype is torch.float32
    assert out.hidden_states[-1].dtype is torch.float16
    assert all(t.dtype is torch.float16 and torch.equal(t, before[n]) for n, t in model.state_dict().items())
    applied.revert()
    assert not any(m._forward_pre_hooks for m in model.modules())


def whisper() -> Any:
    small = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 64, "num_mel_bins": 8}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_source_positions": 16}
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1)
    config = WhisperConfig(
        encoder_layers=8, decoder_layers=6, decoder_start_token_id=2, **small, **heads, **special,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    return WhisperForConditionalGeneration(config).eval()


def test_an_encoder_and_its_decoder_have_a_stream_each(ids: torch.Tensor) -> None:
    model = whisper()
    assert [s.path for s in Survey(model).stacks[""]] == ["model.encoder.layers", "model.decoder.layers"]
    batch = {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": ids}
    overflow(model, batch)
    model = model.half()
    half = {**batch, "input_features": batch["input_features"].half()}
    with torch.no_grad():
        exact = copy.deepcopy(model).float()(**{**half, "input_features": half["input_features"].float()}).logits
        bfloat16 = copy.deepcopy(model).bfloat16()
        other = bfloat16(**{**half, "input_features": half["input_features"].bfloat16()}).logits
        stock = model(**half).logits
        fix(model)
        mine = model(**half)
    assert not (stock.isfinite().all() and error(stock, exact) < error(other, exact))
    assert error(mine.logits, exact) < error(other, exact)
    assert mine.encoder_last_hidden_state.dtype is torch.float16


@pytest.mark.parametrize("adapted", [False, True])
def test_t5_trains_under_float16_autocast(adapted: bool) -> None:
    master = tiny_model("t5")
    rescale(master, WIDE_OUT, {})
    if adapted:
        master = get_peft_model(master, LoraConfig(r=2, target_modules=["wo", "q"], init_lora_weights=False))
    batch = {k: v for k, v in example_inputs(tiny_model("t5")).items() if k != "attention_mask"}
    exact, bfloat16 = gradients(master, batch), gradients(copy.deepcopy(master).bfloat16(), batch)
    model = copy.deepcopy(master)
    with torch.autocast("cpu", dtype=torch.float16):
        assert not model(**batch).loss.isfinite()
        fix(model)
        loss = model(**batch).loss
    (loss * SCALE).backward()
    assert error(loss.detach(), master(**batch).loss.detach()) < 5e-3
    mine = {n: p.grad / SCALE for n, p in model.named_parameters() if p.grad is not None}
    assert mine.keys() == exact.keys()
    flat = [torch.cat([g[n].flatten() for n in exact]) for g in (mine, bfloat16, exact)]
    assert error(flat[0], flat[2]) < error(flat[1], flat[2])


def test_t5_outside_autocast_is_bit_identical() -> None:
    model = tiny_model("t5")
    batch = example_inputs(model)
    with torch.no_grad():
        before = model(**batch).logits
        made = fix(model)
        assert {e.slot for e in made.edits} >= {"input compute dtype"}
        assert torch.equal(model(**batch).logits, before)


def test_what_keeps_t5_from_being_served_by_a_clamp() -> None:
    """Everything in float16 is finite and wrong: what a clamp lets through is not what the weights compute."""
    master = tiny_model("t5")
    rescale(master, {"*.wo.weight": 3e4, "*.wi*.weight": 3.0}, {})
    batch = {k: v for k, v in example_inputs(master).items() if k != "labels"}
    ids = batch["input_ids"]
    model = master.half()
    with torch.no_grad():
        exact = copy.deepcopy(model).float()(**batch, decoder_input_ids=ids).logits
        stock = model(**batch, decoder_input_ids=ids).logits
        fix(model)
        mine = model(**batch, decoder_input_ids=ids).logits
    assert stock.isfinite().all()
    assert error(stock, exact) > 0.5
    assert error(mine, exact) < 5e-3


@pytest.mark.parametrize(("architecture", "why"), [("flex_olmo", "it raises"), ("gemma3n_text", "not finite")])
def test_what_is_not_served_says_why(architecture: str, why: str) -> None:
    made = hfpatch.plan(tiny_model(architecture).half())
    (decision,) = (d for d in made.decisions if d.patch == "fp16-residual-overflow")
    assert decision.decided == "refused"
    assert why in decision.reason


def test_where_no_stream_grows_nothing_is_needed() -> None:
    (decision,) = (d for d in hfpatch.plan(tiny_model("bart").half()).decisions if d.patch == "fp16-residual-overflow")
    assert decision.decided == "not needed"
    assert "returned the output of a norm" in decision.reason


def test_the_old_id_answers_for_t5() -> None:
    """Until 0.1 one patch served both; its id says which one does now, and a bare apply is as before."""
    model = tiny_model("t5").half()
    (decision,) = hfpatch.plan(model, only="fp16-residual-overflow").decisions
    assert (decision.decided, decision.edits) == ("not needed", ())
    assert "wo-overflow is for this architecture" in decision.reason
    assert {d.patch for d in hfpatch.plan(model).of("applied")} == {"wo-overflow", "fp32-attention-logits"}
    assert not [d for d in hfpatch.plan(model).decisions if d.worst]
