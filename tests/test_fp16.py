"""Case 04: the fp16 residual stream of Gemma 2 and 3 and of Llama shapes, bare and inside other models."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import CompileConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hfpatch
from hfpatch.lab.tiny import SpeechLLM, rescale, tiny_model
from hfpatch.patching.verifying.lending import weights_as
from tests.conftest import OVERFLOWING


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((got.float() - exact).norm() / exact.norm()).item())


def fix(model: nn.Module) -> hfpatch.Applied:
    return hfpatch.apply(model, verbose=False, only="fp16-residual-overflow")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_case_04(attention: str, ids: torch.Tensor) -> None:
    """Stock NaN; patched nearer to float32 than bfloat16 and than the clamp that public advice offers."""
    master = tiny_model("gemma3_text")
    rescale(master, {}, OVERFLOWING)
    master.set_attn_implementation(attention)
    clamped, bfloat16 = copy.deepcopy(master).half(), copy.deepcopy(master).bfloat16()
    for layer in clamped.model.layers:
        layer.register_forward_hook(
            lambda _m, _a, out: out.nan_to_num(posinf=65504, neginf=-65504).clamp(-65504, 65504)
        )
    model = copy.deepcopy(master).half()
    with torch.no_grad():
        exact = master(input_ids=ids).logits
        assert not model(input_ids=ids).logits.isfinite().all()
        fix(model)
        mine = error(model(input_ids=ids).logits, exact)
        assert mine < error(bfloat16(input_ids=ids).logits, exact) / 4
        assert mine < error(clamped(input_ids=ids).logits, exact) / 10


def test_the_stream_is_float32_and_nothing_else(gemma: Any, ids: torch.Tensor) -> None:
    """Branches, rotary tables, masks, the cache and last_hidden_state keep the compute dtype."""
    seen: dict[str, set[torch.dtype]] = {}

    def watch(name: str) -> Any:
        def hook(_m: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            tensors = [*args, *kwargs.values(), *(out if isinstance(out, tuple) else (out,))]
            flat = [t for v in tensors for t in (v if isinstance(v, tuple) else (v,)) if isinstance(t, torch.Tensor)]
            seen.setdefault(name, set()).update(t.dtype for t in flat if t.is_floating_point())

        return hook

    fix(gemma)
    for layer in gemma.model.layers:
        layer.self_attn.q_proj.register_forward_hook(watch("q_proj"), with_kwargs=True)
        layer.self_attn.register_forward_hook(watch("attention"), with_kwargs=True)
        layer.mlp.register_forward_hook(watch("mlp"), with_kwargs=True)
        layer.input_layernorm.register_forward_hook(watch("norm"), with_kwargs=True)
    with torch.no_grad():
        out = gemma.model(input_ids=ids, use_cache=True)
    assert seen == {
        "q_proj": {torch.float16},
        "attention": {torch.float16},
        "mlp": {torch.float16},
        "norm": {torch.float32},
    }
    assert out.last_hidden_state.dtype == torch.float16
    assert out[1].layers[0].keys.dtype == torch.float16


@pytest.mark.slow
def test_inside_a_vision_language_model(tiny: Any, ids: torch.Tensor) -> None:
    model = tiny("gemma3")
    rescale(model, {}, OVERFLOWING)
    exact = model(input_ids=ids).logits.detach()
    half = model.half()
    with torch.no_grad():
        assert not half(input_ids=ids).logits.isfinite().all()
        applied = fix(half)
        homes = {e.path.partition(".layers")[0] for e in applied.edits if "layers" in e.path}
        assert homes == {"model.language_model", "model.vision_tower.encoder"}
        assert error(half(input_ids=ids).logits, exact) < 4e-3


def test_inside_a_hand_written_composite(tiny: Any, ids: torch.Tensor) -> None:
    llm = tiny("gemma3_text")
    rescale(llm, {}, OVERFLOWING)
    model, features = SpeechLLM(llm), torch.randn(2, 5, 24)
    exact = model(ids, features).logits.detach()
    half = model.half()
    with torch.no_grad():
        assert not half(ids, features.half()).logits.isfinite().all()
        hfpatch.apply(half, verbose=False, exclude="eps-alignment")
        assert error(half(ids, features.half()).logits, exact) < 4e-3


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_tokens_equal_float32s(cache: str, gemma: Any, ids: torch.Tensor) -> None:
    words = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache if cache == "static" else None}
    exact = copy.deepcopy(gemma).float().generate(input_ids=ids, attention_mask=torch.ones_like(ids), **words)
    fix(gemma)
    assert torch.equal(gemma.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **words), exact)


def test_left_padding(gemma: Any, ids: torch.Tensor) -> None:
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    exact = copy.deepcopy(gemma).float()
    gemma.set_attn_implementation("sdpa")
    exact.set_attn_implementation("sdpa")
    fix(gemma)
    with torch.no_grad():
        got, want = (m(input_ids=ids, attention_mask=mask).logits[mask.bool()] for m in (gemma, exact))
    assert error(got, want) < 4e-3


def test_gradients_are_near_float32s(gemma: Any, ids: torch.Tensor) -> None:
    exact = copy.deepcopy(gemma).float()
    exact(input_ids=ids, labels=ids).loss.backward()
    fix(gemma)
    (gemma(input_ids=ids, labels=ids).loss * 128).backward()
    for name, parameter in gemma.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float16
    mine, theirs = (
        torch.cat([p.grad.float().flatten() / s for p in m.model.layers[-1].mlp.parameters()])
        for m, s in ((gemma, 128), (exact, 1))
    )
    assert error(mine, theirs) < 0.02


def test_norms_kept_in_float32(tiny: Any, ids: torch.Tensor) -> None:
    """Case 18: stock Llama raises with float32 norms in a float16 model; the patch casts at the right edges."""
    model = tiny("llama").half()
    exact = copy.deepcopy(model).float()(input_ids=ids).logits.detach()
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.float()
    with pytest.raises(RuntimeError, match="dtype"):
        model(input_ids=ids)
    fix(model)
    with torch.no_grad():
        assert error(model(input_ids=ids).logits, exact) < 4e-3


def test_verify(gemma: Any, ids: torch.Tensor) -> None:
    """Figures equal those of separate models; the model is left patched, in its mode, with its weights."""
    before = {n: p.data_ptr() for n, p in gemma.named_parameters()}
    gemma.train()
    gemma.model.layers[0].mlp.eval()
    fixed = fix(gemma)
    proof = fixed.verify({"input_ids": ids})
    assert (proof["before"].finite, proof["after"].finite) == (False, True)
    assert proof["before"].loss != proof["before"].loss
    assert proof["after"].kl < proof["bfloat16 weights"].kl / 10
    assert proof["after"].top1 == 1
    exact = copy.deepcopy(gemma).float()
    hfpatch.revert(exact)
    loss = exact.eval()(input_ids=ids, labels=ids).loss.item()
    assert proof.reference.loss == pytest.approx(loss, rel=1e-5)
    assert proof.reference.kl == 0
    assert {n: p.data_ptr() for n, p in gemma.named_parameters()} == before
    assert hfpatch.status(gemma).patches == ("fp16-residual-overflow",)
    assert gemma.training
    assert not gemma.model.layers[0].mlp.training
    assert "before" in str(proof)
    assert set(proof.to_dict()) == {"model", "reference", "rows", "notes"}


def test_verify_wants_a_batch_that_fits(gemma: Any) -> None:
    with pytest.raises(hfpatch.errors.InputError, match="the batch does not fit"):
        fix(gemma).verify({"input_idz": torch.ones(1, 4)})


def test_weights_as_is_a_float32_copy_without_the_copy(tiny: Any, ids: torch.Tensor) -> None:
    model = tiny("gemma3_text").half()
    with torch.no_grad():
        exact = copy.deepcopy(model).float()(input_ids=ids).logits
        with weights_as(model, torch.float32):
            assert torch.equal(model(input_ids=ids).logits, exact)
        with pytest.raises(ZeroDivisionError), weights_as(model, torch.float32):
            raise ZeroDivisionError
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert all(not m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("norm", ["input_layernorm", "post_feedforward_layernorm", "norm"])
def test_norms_that_peft_wraps_are_norms_still(norm: str, gemma: Any, ids: torch.Tensor) -> None:
    exact = copy.deepcopy(gemma).float()(input_ids=ids).logits.detach()
    wrapped = get_peft_model(gemma, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=[norm]))
    applied = fix(wrapped)
    assert not [e.path for e in applied.edits if "norm" in e.path and e.after.rule.weight and norm != "norm"]
    with torch.no_grad():
        assert error(wrapped(input_ids=ids).logits, exact) < 4e-3


@pytest.mark.parametrize("part", ["input_layernorm", ""])
def test_compiled_parts(part: str, gemma: Any, ids: torch.Tensor) -> None:
    torch._dynamo.reset()
    exact = copy.deepcopy(gemma).float()(input_ids=ids).logits.detach()
    layers = gemma.model.layers
    for i, layer in enumerate(layers):
        if part:
            setattr(layer, part, torch.compile(getattr(layer, part), backend="eager"))
        else:
            layers[i] = torch.compile(layer, backend="eager")
    fix(gemma)
    with torch.no_grad():
        assert error(gemma(input_ids=ids).logits, exact) < 4e-3


@pytest.mark.parametrize("cast_adapters", [True, False])
def test_verify_on_a_lora_model(cast_adapters: bool, gemma: Any, ids: torch.Tensor) -> None:
    model = get_peft_model(
        gemma, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False), autocast_adapter_dtype=cast_adapters
    )
    before = {n: (id(p), p.data_ptr(), p.dtype) for n, p in model.named_parameters()}
    proof = fix(model).verify({"input_ids": ids})
    assert proof["after"].finite
    assert proof["after"].kl < proof["bfloat16 weights"].kl / 10
    assert {n: (id(p), p.data_ptr(), p.dtype) for n, p in model.named_parameters()} == before


def test_verify_on_a_composite_with_features(ids: torch.Tensor) -> None:
    llm = tiny_model("gemma3_text")
    rescale(llm, {}, OVERFLOWING)
    model = SpeechLLM(llm).half()
    proof = hfpatch.apply(model, verbose=False).verify({"input_ids": ids, "features": torch.randn(2, 3, 24)})
    assert proof["after"].finite
    assert proof["after"].kl < proof["bfloat16 weights"].kl


def test_verify_leaves_hooks_in_their_order(gemma: Any, ids: torch.Tensor) -> None:
    fixed = fix(gemma)
    seen: list[torch.dtype] = []
    gemma.model.layers[0].register_forward_pre_hook(lambda _m, args: seen.append(args[0].dtype))
    fixed.verify({"input_ids": ids})
    seen.clear()
    gemma(input_ids=ids)
    assert seen == [torch.float32]


@pytest.mark.parametrize("batch", [None, [1], {"input_ids": torch.full((1, 4), 999)}, {"past_key_values": 1}])
def test_verify_of_a_bad_batch(batch: Any, gemma: Any) -> None:
    fixed = fix(gemma)
    with pytest.raises(hfpatch.errors.InputError):
        fixed.verify(batch)
    assert hfpatch.status(gemma).patches == ("fp16-residual-overflow",)
    assert {p.dtype for p in gemma.parameters()} == {torch.float16}


def test_no_target_is_no_loss(gemma: Any, ids: torch.Tensor) -> None:
    proof = fix(gemma).verify({"input_ids": ids, "labels": torch.full_like(ids, -100)})
    assert proof["after"].loss != proof["after"].loss
    assert proof["after"].top1 == 1


def test_a_compiled_forward_is_seen(gemma: Any, ids: torch.Tensor) -> None:
    torch._dynamo.reset()
    gemma.forward = torch.compile(gemma.forward, backend="eager")
    gemma(input_ids=ids)
    with pytest.raises(hfpatch.errors.RefusedError, match=r"torch\._dynamo\.reset"):
        fix(gemma)
    torch._dynamo.reset()


def test_what_generate_compiled_is_seen(gemma: Any, ids: torch.Tensor) -> None:
    torch._dynamo.reset()
    compile_config = CompileConfig(backend="eager", fullgraph=False, mode=None)
    compile_config._compile_all_devices = True
    words = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    gemma.generate(ids, attention_mask=torch.ones_like(ids), compile_config=compile_config, **words)
    with pytest.raises(hfpatch.errors.RefusedError, match=r"torch\._dynamo\.reset"):
        fix(gemma)
    torch._dynamo.reset()


class Gated(LlamaDecoderLayer):
    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(hidden_states, **kwargs) * 1.0


def test_a_forward_that_somebody_else_wrote_is_refused(tiny: Any) -> None:
    """The repro runs transformers' own layers: it cannot speak for these."""
    subclassed, replaced = tiny("llama").half(), tiny("llama").half()
    for layer in subclassed.model.layers:
        layer.__class__ = Gated
    layer = replaced.model.layers[1]
    layer.forward = types.MethodType(lambda self, x, **_: x, layer)
    for model in (subclassed, replaced):
        with pytest.raises(hfpatch.errors.RefusedError, match="which no repro of this patch runs"):
            fix(model)
        assert hfpatch.apply(model, exclude="fp32-*", verbose=False).edits == ()
