"""Attention: float32 logits, the choice of an implementation for one model, the kernel to keep off."""

from __future__ import annotations

import copy
import json
import pickle
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

import hfpatch
import hfpatch.patching.kinds.choose_attention  # registers the implementations by name
from hfpatch.errors import ConflictError, RefusedError, RevertError
from hfpatch.lab.tiny import rescale, tiny_config, tiny_model
from hfpatch.model.attention import attentions, eager_function
from hfpatch.model.survey import Survey
from hfpatch.numerics import attention_functions as attention
from hfpatch.numerics.attention_functions import differs_from_eager, fp32_logits_attention, sdpa_without_cudnn
from tests.fingerprint import fingerprint
from tests.sampling import first_quick, slow

FP32 = "fp32-attention-logits"
EAGER = "eager-attention"
NAME = "hfpatch_fp32_logits"
LOUD = {"*q_proj.bias": 120.0, "*k_proj.bias": -120.0}


def impl(model: Any) -> str:
    return model.config._attn_implementation


def qkv(dtype: torch.dtype, scale: float, offset: float = 0.0, width: int = 64) -> list[torch.Tensor]:
    """Scaled logits of this standard deviation and mean; 4 query heads, 2 key heads, 48 tokens."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 48, width, generator=generator) for h in (4, 2, 2))
    q *= scale
    if offset:
        size = abs(offset * width**0.5) ** 0.5
        q[..., 0], k[..., 0] = size, size * (1 if offset > 0 else -1)
    return [t.to(dtype) for t in (q, k, v)]


def stub(**more: Any) -> Any:
    return SimpleNamespace(num_key_value_groups=2, is_causal=True, training=False, **more)


def run(function: Any, inputs: list[torch.Tensor], autocast: torch.dtype | None = None) -> list[torch.Tensor]:
    leaves = [t.clone().requires_grad_() for t in inputs]
    with torch.autocast("cpu", dtype=autocast) if autocast else nullcontext():
        out = function(*leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).double()
    return [t.detach().double() for t in (out, *torch.autograd.grad((out.double() * weight).sum(), leaves))]


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return fp32_logits_attention(stub(), q, k, v, None)[0]


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return fp32_logits_attention(stub(), q, k, v, None, output_attentions=True)[0]


def math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.mark.need(
    "the product of queries and keys in float32",
    "one call",
    '`hfpatch.apply(model, include=["fp32-attention-logits"])`; for eager float16 `hfpatch.apply(model)` is enough. '
    "The product, not its result, with autocast off",
)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("scale", "offset"), [(1, 0), (4, 0), (16, 0), (64, 0), (256, 0), (1024, 0), (4, -120), (4, 500), (4, 3000)]
)
def test_as_near_to_float64_as_the_math_backend(
    scale: float, offset: float, dtype: torch.dtype, autocast: bool
) -> None:
    inputs = qkv(dtype, scale, offset)
    exact = run(math, [t.double() for t in inputs])
    best = run(math, inputs)
    for ours in (fused, written_out):
        for mine, math_, true in zip(run(ours, inputs, dtype if autocast else None), best, exact, strict=True):
            assert (mine - true).norm() <= 1.3 * (math_ - true).norm()


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float16).min, -torch.inf, None])
@pytest.mark.parametrize("form", [fused, written_out])
def test_a_row_that_may_look_at_nothing_gives_zero_and_lends_nothing(form: Any, lowest: float | None) -> None:
    """For masks that are boolean (None), or additive with either way to say "not at all"."""
    inputs = qkv(torch.float16, 4, -120)
    allowed = torch.ones(48, 48).tril().bool()[None, None].clone()
    allowed[..., :9] = False  # left padding: rows 0 to 8 look at nothing
    mask = allowed if lowest is None else torch.zeros(1, 1, 48, 48).half().masked_fill(~allowed, lowest)
    more = {"output_attentions": True} if form is written_out else {}

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return fp32_logits_attention(stub(), q, k, v, mask, **more)[0]

    out, dq, dk, dv = run(ours, inputs)
    assert torch.equal(out[:, :9], torch.zeros_like(out[:, :9]))
    assert torch.equal(dq[:, :, :9], torch.zeros_like(dq[:, :, :9]))
    for grad in (dk, dv):
        assert torch.equal(grad[:, :, :9], torch.zeros_like(grad[:, :, :9]))
    alone = run(form, [t[:, :, 9:] for t in inputs])
    # with fewer tokens the weight of the sum differs, so only outputs are compared with those of the unpadded row
    assert torch.allclose(out[:, 9:], alone[0], rtol=2e-3, atol=1e-3)
    theirs, _ = eager_attention_forward(
        stub(), *inputs, torch.zeros(1, 1, 48, 48).half().masked_fill(~allowed, torch.finfo(torch.float16).min), 0.125
    )
    assert theirs[:, :9].isnan().any()


def test_a_float16_mask_does_not_lose_to_large_logits() -> None:
    """Logits of 1e5 against a mask of -65,504: in float32 the mask would be a mere number."""
    q = k = torch.full((1, 1, 3, 8), 300.0)
    v = torch.arange(3.0).reshape(1, 1, 3, 1).expand(1, 1, 3, 8)
    k = k * torch.tensor([1.0, 1.5, 2.0]).reshape(1, 1, 3, 1)  # the future has the larger logits
    mask = torch.full((3, 3), torch.finfo(torch.float16).min).triu(1).half()[None, None]
    module = SimpleNamespace(num_key_value_groups=1, is_causal=True, training=False)
    for more in ({}, {"output_attentions": True}):
        out, _ = fp32_logits_attention(module, q, k, v, mask, scaling=1.0, **more)  # pyright: ignore[reportArgumentType]
        assert torch.allclose(out[0, :, 0, 0], torch.tensor([0.0, 1.0, 2.0]))


def test_soft_additive_masks_and_position_biases_are_added() -> None:
    q, k, v = qkv(torch.float32, 2)
    bias = torch.randn(1, 4, 48, 48, generator=torch.Generator().manual_seed(2))
    wanted = eager_attention_forward(stub(), q, k, v, bias, 0.125)[0]
    assert torch.allclose(fp32_logits_attention(stub(), q, k, v, bias)[0], wanted, atol=1e-5)
    flat = torch.zeros(1, 1, 48, 48)
    assert torch.allclose(fp32_logits_attention(stub(), q, k, v, flat, position_bias=bias)[0], wanted, atol=1e-5)


RUN = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "gpt_oss", "mixtral",
       "qwen3_moe", "olmo2", "cohere2", "granite", "granite_swa"]  # fmt: skip


@pytest.mark.parametrize("name", [n if n in ("llama", "gemma2", "gpt_oss") else slow(n) for n in RUN])
def test_same_logits_as_eager_attention_in_float32(name: str, ids: torch.Tensor) -> None:
    """Soft-caps, sinks, sliding windows (8 of 24 tokens), grouped heads, padding, both caches, generation."""
    model: Any = tiny_model(name)
    long = torch.cat([ids, ids.flip(1)], dim=1)
    padding = torch.ones_like(long)
    padding[0, :7] = 0
    prompt = {"input_ids": long, "attention_mask": padding}
    keep = padding.bool()
    before = runs(model, prompt, keep)
    fix = hfpatch.apply(model, include=FP32, verbose=False)
    assert impl(model).startswith(NAME), fix.plan
    after = runs(model, prompt, keep)
    for what, (b, a) in {k: (before[k], after[k]) for k in before}.items():
        assert torch.allclose(b, a, atol=2e-5), what
    fix.revert()
    assert impl(model) == "eager"


@pytest.mark.parametrize("name", ["deepseek_v4", "minimax_m3_vl_text"])
def test_models_that_work_on_their_masks_get_masks_to_work_on(name: str, ids: torch.Tensor) -> None:
    """DeepSeek V4 appends to the mask what its compressed keys need: numbers to add, not booleans."""
    model: Any = tiny_model(name)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        hfpatch.apply(model, only=FP32, verbose=False)
        assert impl(model) == (NAME + "_masked" if name == "deepseek_v4" else NAME)
        assert torch.allclose(model(input_ids=ids, attention_mask=mask).logits[mask.bool()], wanted, atol=1e-5)


def runs(model: Any, prompt: dict[str, torch.Tensor], keep: torch.Tensor) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        out["padded"] = model(**prompt).logits[keep]
        out["plain"] = model(input_ids=prompt["input_ids"]).logits
    greedy = {
        "max_new_tokens": 6,
        "do_sample": False,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    for kind in ("dynamic", "static"):
        made = model.generate(**prompt, **greedy, cache_implementation=kind, disable_compile=True)
        out[f"{kind} cache"] = torch.stack(made.logits)
    return out


@pytest.mark.parametrize("name", [*RUN, "deepseek_v3", "gptj", "t5", "bart", "whisper"])
def test_the_trial_run_accepts_what_is_alike(name: str) -> None:
    model = tiny_model(name) if name not in ("t5", "bart", "whisper") else _built(name)
    survey = Survey(model)
    found = [a for s in survey.submodels for a in attentions(survey, s)]
    assert found
    cap = getattr(model.config, "attn_logit_softcapping", None)
    assert {differs_from_eager(a.eager, a.module, cap) for a in found} == {None}


def _built(name: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    sizes = {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "vocab_size": 64,
        "pad_token_id": 0,
    }
    t5 = {"d_model": 32, "d_kv": 8, "num_layers": 1, "num_heads": 4, "vocab_size": 64, "d_ff": 48}
    config = CONFIG_MAPPING[name](**(t5 if name == "t5" else sizes))
    build = AutoModelForSpeechSeq2Seq if name == "whisper" else AutoModelForSeq2SeqLM
    return build.from_config(config, attn_implementation="eager")


def test_attention_that_computes_something_else_is_refused_by_name(tiny: Any) -> None:
    def louder(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **_: Any) -> Any:
        return eager_attention_forward(module, query, key, value, attention_mask, scaling * 2)

    def renamed(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        return eager_attention_forward(module, query, key, value, mask, **kwargs)

    model = tiny("llama")
    module = model.model.layers[0].self_attn
    assert differs_from_eager(louder, module, None) == "gives a different output with a mask"
    assert differs_from_eager(renamed, module, None) == "takes its mask as 'mask'"
    assert differs_from_eager(eager_attention_forward, module, None) is None
    assert "does not run on its own (TypeError" in str(differs_from_eager(lambda: None, module, None))


@pytest.mark.slow
def test_what_the_plan_says(tiny: Any) -> None:
    decided = {
        (dtype, attn): {d.patch: d for d in hfpatch.plan(with_attention(tiny("llama").to(dtype), attn)).decisions}
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
        for attn in ("eager", "sdpa")
    }
    logits = {k: (v[FP32].decided, v[FP32].suggested) for k, v in decided.items()}
    assert logits == {
        (torch.float16, "eager"): ("applied", True),
        (torch.float16, "sdpa"): ("opt-in", False),
        (torch.bfloat16, "eager"): ("opt-in", True),
        (torch.bfloat16, "sdpa"): ("opt-in", False),
        (torch.float32, "eager"): ("opt-in", False),
        (torch.float32, "sdpa"): ("opt-in", False),
    }
    eager = {k: v[EAGER].decided for k, v in decided.items()}
    assert eager[torch.float16, "sdpa"] == "refused"
    assert "fp32-attention-logits" in decided[torch.float16, "sdpa"][EAGER].reason
    assert eager[torch.bfloat16, "sdpa"] == "opt-in"
    assert "less exact" in decided[torch.bfloat16, "sdpa"][EAGER].reason
    assert eager[torch.bfloat16, "eager"] == "not needed"
    assert hfpatch.plan(tiny("llama"), compute_dtype="float16", only=FP32).edits


def with_attention(model: Any, name: str) -> Any:
    model.set_attn_implementation(name)
    return model


def test_suggested_leaves_alone_what_nothing_asks_for(tiny: Any) -> None:
    model = with_attention(tiny("llama").bfloat16(), "sdpa")
    hfpatch.apply(model, include="suggested", verbose=False)
    assert impl(model) == "sdpa"


def test_eager_and_sdpa_are_told_apart_in_float16_under_padding_and_large_products() -> None:
    """Cases 01 and 02: eager is NaN where sdpa and ours are right; and `eager-attention` is not the answer."""
    ids = torch.arange(1, 21).reshape(2, 10)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    for fill in (LOUD, {"*q_proj.bias": 6.0, "*k_proj.bias": -6.0}):
        model: Any = tiny_model("qwen2")
        rescale(model, {}, fill)
        with torch.no_grad():
            exact = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
            model.half()
            assert not model(input_ids=ids, attention_mask=mask).logits[mask.bool()].isfinite().all()
            with hfpatch.apply(model, verbose=False) as fix:
                assert FP32 in {d.patch for d in fix.plan.of("applied")}
                for region in (nullcontext(), torch.autocast("cpu", dtype=torch.float16)):
                    with region:
                        logits = model(input_ids=ids, attention_mask=mask).logits[mask.bool()].float()
                    assert (logits - exact).norm() < 0.01 * exact.norm()
            model.set_attn_implementation("sdpa")
            with pytest.raises(RefusedError, match="overflows in float16"):
                hfpatch.apply(model, only=EAGER)


def test_a_soft_cap_does_not_save_a_padded_row(tiny: Any, ids: torch.Tensor) -> None:
    """Gemma 2 with capped logits of -50: added to float16's lowest value that is -inf, for all keys."""
    model = tiny("gemma2")
    rescale(model, {}, {"*q_proj.weight": 1.0, "*k_proj.weight": -1.0, "*embed_tokens.weight": 1.0})
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        exact = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        model.half()
        assert not model(input_ids=ids, attention_mask=mask).logits[mask.bool()].isfinite().all()
        fix = hfpatch.apply(model, exclude="fp16-*", verbose=False)
        assert "soft-cap of 50" in next(d.reason for d in fix.plan.of("applied"))
        ours = model(input_ids=ids, attention_mask=mask).logits[mask.bool()].float()
    assert (ours - exact).norm() < 0.01 * exact.norm()


def test_a_soft_cap_forced_onto_sdpa_is_what_eager_attention_is_for(tiny: Any, ids: torch.Tensor) -> None:
    """Case 03: the setter refuses; by hand it is taken, and the cap is lost or the forward fails."""
    model = tiny("gemma2")
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    with pytest.raises(ValueError, match=r"sdpa|scaled_dot_product"):
        model.set_attn_implementation("sdpa")
    model.config._attn_implementation = "sdpa"
    (decision,) = (d for d in hfpatch.plan(model).decisions if d.patch == EAGER)
    assert (decision.decided, decision.suggested, decision.effect) == ("opt-in", True, "changes-function")
    assert "ignores its soft-cap" in decision.reason
    hfpatch.apply(model, include="suggested", verbose=False)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, wanted)


@pytest.mark.parametrize("patch", [EAGER, FP32])
def test_another_model_with_the_same_config_object_keeps_its_attention(patch: str) -> None:
    config = tiny_config("llama")
    one, two = (AutoModelForCausalLM.from_config(config, attn_implementation="sdpa") for _ in range(2))
    for model in (one, two):
        for module in model.modules():
            if hasattr(module, "config"):
                module.config = config
    config._attn_implementation = "sdpa"
    before = fingerprint(two)
    mine = fingerprint(one)
    fix = hfpatch.apply(one, only=patch, verbose=False)
    assert impl(one) != "sdpa"
    assert {impl(m) for m in one.modules() if hasattr(m, "config")} == {impl(one)}
    assert fingerprint(two) == before
    fix.revert()
    assert fingerprint(one) == mine


def test_only_the_submodel_asked_about_switches(tiny: Any) -> None:
    """In a vision-language model the masks are made by the parent, from the parent's config: it must see the change."""
    model = tiny("gemma3").half()
    before = fingerprint(model)
    fix = hfpatch.apply(model, only=FP32, verbose=False)
    assert {e.path for e in fix.edits} == {"model.language_model", "model.vision_tower"}
    assert model.config.text_config is model.model.language_model.config
    assert model.config.text_config._attn_implementation == NAME
    assert impl(model) == "eager"
    fix.revert()
    assert fingerprint(model) == before


def test_values_set_on_the_config_meanwhile_stay(tiny: Any) -> None:
    model = tiny("llama").half()
    fix = hfpatch.apply(model, only=FP32, verbose=False)
    model.config.use_cache = False
    fix.revert()
    assert impl(model) == "eager"
    assert model.config.use_cache is False


def test_a_choice_of_somebody_else_is_not_overwritten(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny("llama").half()
    fix = hfpatch.apply(model, only=FP32, verbose=False)
    model.set_attn_implementation("sdpa")
    fix.revert()
    assert "attention is sdpa; fp32-attention-logits had set it to hfpatch_fp32_logits" in capsys.readouterr().err
    assert impl(model) == "sdpa"


def test_a_name_that_transformers_does_not_know(tiny: Any, ids: torch.Tensor) -> None:
    model = tiny("llama")
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    model.config._attn_implementation = "flash_attention"
    before = fingerprint(model)
    with pytest.raises(RefusedError, match="'flash_attention', which transformers does not have"):
        hfpatch.apply(model, only=FP32)
    assert fingerprint(model) == before
    hfpatch.apply(model, include="suggested", verbose=False)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, wanted)
    hfpatch.revert(model)
    assert fingerprint(model) == before


def test_two_choices_are_a_conflict(tiny: Any) -> None:
    model = with_attention(tiny("llama"), "sdpa")
    with pytest.raises(ConflictError, match="attention"):
        hfpatch.plan(model, include=[EAGER, FP32])
    hfpatch.apply(model, only=FP32, verbose=False)
    with pytest.raises(RefusedError, match="revert that patch first"):
        hfpatch.apply(model, only=EAGER)


def test_copies_and_pickles_run_and_revert(tiny: Any, ids: torch.Tensor) -> None:
    model = tiny("llama").half()
    hfpatch.apply(model, only=FP32, verbose=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        with torch.no_grad():
            assert torch.equal(other(input_ids=ids).logits, model(input_ids=ids).logits)
        hfpatch.revert(other)
        assert impl(other) == "eager"
        assert impl(model) == NAME


def test_saved_configs_do_not_name_the_patch(tiny: Any, tmp_path: Any) -> None:
    model = tiny("llama").half()
    hfpatch.apply(model, only=FP32, verbose=False)
    model.save_pretrained(tmp_path)
    assert "hfpatch" not in (tmp_path / "config.json").read_text()
    assert impl(AutoModelForCausalLM.from_pretrained(tmp_path)) == "sdpa"


def test_gradients_and_checkpointing(ids: torch.Tensor) -> None:
    model: Any = tiny_model("qwen2")
    rescale(model, {}, LOUD)
    exact = gradients(model, ids)
    model.half()
    assert not all(g.isfinite().all() for g in gradients(model, ids).values())
    hfpatch.apply(model, verbose=False)
    plain = gradients(model, ids)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again = gradients(model, ids)
    loud = "self_attn.q_proj", "self_attn.k_proj"  # of a softmax over equal logits: rounding and nothing else
    for name, wanted in exact.items():
        assert torch.equal(plain[name], again[name])
        assert plain[name].isfinite().all()
        if not any(part in name for part in loud):
            assert (plain[name].float() - wanted).norm() < 0.05 * wanted.norm(), name


def gradients(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def test_memory_grows_with_the_length_where_torch_does_it() -> None:
    """No tensor of tokens squared is made: 4,096 tokens squared would be 64 MiB in float32."""
    q, k, v = (torch.randn(1, 1, 4096, 8) for _ in range(3))
    largest = Largest()
    with largest:
        fp32_logits_attention(
            SimpleNamespace(num_key_value_groups=1, is_causal=True, training=False), q.half(), k.half(), v.half(), None
        )  # type: ignore[arg-type]
    assert 0 < largest.numel <= q.numel()


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the largest tensor that any operation gives."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_a_compiled_model(ids: torch.Tensor) -> None:
    model = Qwen2ForCausalLM._from_config(
        Qwen2Config(**tiny_config("qwen2").to_diff_dict()), attn_implementation="eager"
    )
    model.eval().half()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        hfpatch.apply(compiled, only=FP32, verbose=False)
        patched = compiled(input_ids=ids).logits
        assert torch.equal(patched, model(input_ids=ids).logits)
        with pytest.raises(RevertError, match=r"torch._dynamo.reset\(\) first"):
            hfpatch.revert(compiled)
        torch._dynamo.reset()
        hfpatch.revert(compiled)
        assert not torch.equal(compiled(input_ids=ids).logits, patched)


def test_cudnn_is_switched_off_for_the_call_only(tiny: Any, ids: torch.Tensor, monkeypatch: Any) -> None:
    seen: list[bool] = []
    real = nn.functional.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return real(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", watched)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    model = with_attention(tiny("llama"), "sdpa")
    long = ids.repeat(1, 6)
    mask = torch.ones_like(long)
    mask[0, :5] = 0
    failing, other = ({"input_ids": long[:, :n], "attention_mask": mask[:, :n]} for n in (64, 63))
    wanted = model(**failing).logits
    model.set_attn_implementation("hfpatch_sdpa_without_cudnn")
    assert torch.equal(model(**failing).logits, wanted)
    assert seen == [True] * 4 + [False] * 4
    model.set_attn_implementation(NAME)
    monkeypatch.setattr(attention, "SMALL", 0)
    with torch.no_grad():
        assert torch.allclose(model(**failing).logits[mask[:, :64].bool()], wanted[mask[:, :64].bool()], atol=1e-5)
    assert seen[8:] == [False] * 4
    del seen[8:]
    model.set_attn_implementation("hfpatch_sdpa_without_cudnn")
    model(**other)
    model(input_ids=long[:, :64])  # causal, no mask
    assert seen[8:] == [True] * 8
    assert torch.backends.cuda.cudnn_sdp_enabled()
    q, k, v = (t.repeat(1, 1, 4, 1) for t in qkv(torch.float32, 1))
    with pytest.raises(RuntimeError, match=r"must match|expand"):
        sdpa_without_cudnn(stub(), q, k, v, torch.ones(7, 7).bool())
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_cudnn_is_left_alone_off_hopper(tiny: Any) -> None:
    (decision,) = hfpatch.plan(with_attention(tiny("llama"), "sdpa"), only="cudnn-*").decisions
    assert (decision.decided, decision.reason) == (
        "not needed", "its weights are on cpu; the fault occurs on Hopper GPUs"
    )  # fmt: skip
    assert (
        not hasattr(attention.cudnn_backward_fails, "cache_info")
        or attention.cudnn_backward_fails.cache_info().misses == 0
    )


def _seq2seq(name: str) -> Any:
    from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel

    if name != "encoder-decoder":
        return _built(name)
    bert = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 64,
    }
    decoder = BertConfig(**bert, is_decoder=True, add_cross_attention=True)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**bert), decoder)
    return EncoderDecoderModel(config=config)


@pytest.mark.thorough
@pytest.mark.parametrize("name", first_quick(["t5", "bart", "whisper", "encoder-decoder"]))
def test_every_config_of_an_encoder_decoder_goes_back(name: str) -> None:
    model = _seq2seq(name).half().eval()
    model.set_attn_implementation("eager")
    stranger = type(model.get_encoder())(model.get_encoder().config) if name == "t5" else None
    before = fingerprint(model)
    with hfpatch.apply(model, verbose=False) as fix:
        assert FP32 in {d.patch for d in fix.plan.of("applied")}
        assert {impl(m) for m in model.modules() if hasattr(m, "sinks") or hasattr(m, "is_causal")} <= {
            NAME,
            NAME + "_masked",
            "eager",
        }
        if stranger is not None:
            assert impl(stranger) == "eager"
    assert fingerprint(model) == before


class Unsaid(nn.Module):
    """An attention module that does not say whether it is causal."""

    num_key_value_groups = 1
    training = False


def test_no_mask_means_everything_to_a_module_that_does_not_say() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    wanted = eager_attention_forward(Unsaid(), q, k, v, None, 0.3)[0]
    for more in ({}, {"output_attentions": True}):
        assert torch.allclose(fp32_logits_attention(Unsaid(), q, k, v, None, scaling=0.3, **more)[0], wanted, atol=1e-6)


def test_masks_are_made_where_one_left_out_would_mean_something_else(tiny: Any, ids: torch.Tensor) -> None:
    model = tiny("llama")
    for layer in model.model.layers:
        del layer.self_attn.is_causal
    model.eval()
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        hfpatch.apply(model, only=FP32, verbose=False)
        assert impl(model) == NAME + "_masked"
        assert torch.allclose(model(input_ids=ids).logits, wanted, atol=1e-5)


def test_a_prefix_that_looks_both_ways_stays_so() -> None:
    """PaliGemma makes a mask of "everything", which sdpa's masks leave out and a causal module takes for causal."""
    model: Any = tiny_model("paligemma")
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    for kinds in (None, torch.zeros_like(ids)):
        words = {"input_ids": ids} | ({} if kinds is None else {"token_type_ids": kinds})
        with torch.no_grad():
            wanted = model(**words).logits
            with hfpatch.apply(model, only=FP32, verbose=False):
                assert torch.allclose(model(**words).logits, wanted, atol=1e-5)


@pytest.mark.slow
def test_layers_that_carry_padding_on_are_not_patched_unasked() -> None:
    model = tiny_model("recurrent_gemma").half()
    found = {d.patch: d for d in hfpatch.plan(model).decisions}
    assert (found[FP32].decided, found[FP32].suggested) == ("opt-in", True)
    assert "layers without attention" in found[FP32].reason


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt"])
def test_weights_that_the_config_asks_for_are_returned(name: str) -> None:
    model: Any = tiny_model(name, max_position_embeddings=512).half()
    ids = torch.randint(3, 60, (1, 300), generator=torch.Generator().manual_seed(0))
    model.config.output_attentions = True
    wanted = model(ids).attentions
    hfpatch.apply(model, verbose=False)
    assert impl(model).startswith(NAME)
    found = model(ids).attentions
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(mine.float(), theirs.float(), atol=2e-3)


def test_a_choice_lost_since_is_said_and_can_be_made_again(tiny: Any) -> None:
    model = tiny("llama").half()
    hfpatch.apply(model, verbose=False)
    model.set_attn_implementation("eager")
    found = {d.patch: d for d in hfpatch.plan(model).decisions}
    assert found[FP32].decided == "applied"
    assert (
        found[FP32].lapsed
        == f"{FP32} was applied before and one of its edits is gone, first attention of the model itself"
    )
    hfpatch.apply(model, verbose=False)
    assert impl(model) == NAME


@pytest.mark.parametrize("name", ["wav2vec2", "diffllama"])
def test_a_plan_draws_no_random_numbers(name: str) -> None:
    from transformers import CONFIG_MAPPING, AutoModel

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    model = AutoModel.from_config(CONFIG_MAPPING[name](**small))
    state = torch.get_rng_state()
    hfpatch.plan(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_code_compiled_beside_the_model_is_warned_of(ids: torch.Tensor, tiny: Any) -> None:
    model = tiny("llama").half()
    compiled = torch.compile(model, backend="eager")
    compiled(input_ids=ids)
    found = {d.patch: d for d in hfpatch.plan(model).decisions}
    assert "this process has compiled code for" in found[FP32].reason
    torch._dynamo.reset()
    assert "compiled code" not in {d.patch: d for d in hfpatch.plan(model).decisions}[FP32].reason


def test_the_figures_that_explain_quotes_are_those_of_the_results() -> None:
    results = json.loads((Path(__file__).parent.parent / "benchmarks/results/attention_error-cpu.json").read_text())
    assert results["worst / math"] <= results["target"]
    rows = {(r["logit std"], r["offset"]): r for r in results["rows"] if r["dtype"] == "bfloat16"}
    quoted = [rows[1, 0], rows[16, 0], rows[1024, 0], rows[4, 3000]]
    text = hfpatch.explain(EAGER)
    for way in ("eager", "sdpa"):
        for row in quoted:
            assert f"{row[way][0]:.1e}" in str(text)


def test_the_gpu_figures_that_explain_quotes_are_those_of_the_results() -> None:
    folder = Path(__file__).parent.parent / "benchmarks/results"
    rows = json.loads((folder / "attention_error-h100.json").read_text())["rows"]
    pairs = [(r["fp32 logits, each"], r["sdpa math, each"]) for r in rows]
    assert max(ours[0] / best[0] for ours, best in pairs) <= 1.3
    worst = [max(a / b for a, b in zip(ours[1:], best[1:], strict=True)) for ours, best in pairs]
    text = " ".join(str(hfpatch.explain(FP32)).split())
    assert f"gradients are not ({min(worst):.1f} to {max(worst):.0f} times" in text
    rows = json.loads((folder / "attention_speed-4160-h100.json").read_text())["rows"]
    slower = [r["time / stock"] for r in rows if (r["way"], r["mask"]) == ("without cuDNN", "padded")]
    text = " ".join(str(hfpatch.explain("cudnn-attention-backward-nan")).split())
    assert f"{min(slower):.1f} to {max(slower):.1f} times as long" in text
    rows = json.loads((folder / "attention_speed-4096-h100.json").read_text())["rows"]
    assert all(abs(r["time / stock"] - 1) < 0.01 for r in rows if r["way"] == "without cuDNN")


class Now(nn.Module):
    """Looks its implementation up as the installed release does."""

    def forward(self, x: torch.Tensor) -> Any:
        return ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", eager_attention_forward)(x)


class Later(nn.Module):
    """By a method of another name."""

    def forward(self, x: torch.Tensor) -> Any:
        return ALL_ATTENTION_FUNCTIONS.interface_for("sdpa", eager_attention_forward)(x)


class Never(nn.Module):
    """As an attribute of the registry, which has none of that name (Kosmos-2.5's tower): it is always eager."""

    def forward(self, x: torch.Tensor) -> Any:
        return getattr(ALL_ATTENTION_FUNCTIONS, "sdpa", eager_attention_forward)(x)


def test_an_attention_that_looks_its_implementation_up_by_any_method_is_one() -> None:
    assert eager_function(Now) is eager_attention_forward
    assert eager_function(Later) is eager_attention_forward
    assert eager_function(Never) is None
