"""Runs the residual stream in float32 where float16 cannot hold it.

## What goes wrong
Every decoder layer adds its branches to one running sum, the residual stream. In some models that sum
passes 65,504, the largest float16, though no projection does: the addition gives inf, the next norm
turns it into NaN, and the loss is NaN at every step. Gemma 3 270M's stream reaches about 1e5, so the model
is unusable when cast to float16, with and without autocast, with eager and sdpa attention.

## What this changes
The input of the first decoder layer is cast to float32, and the norms of the layers then write
float32. A norm after a branch (Gemma 2 and 3) is given float32 too: what it adds can pass 65,504 by itself. Attention
and MLP get their input cast back to the dtype of their own weights, and the final norm's output is cast
back too. Weights, state dict and the dtype of `last_hidden_state` and of the KV cache stay
as they are; `hidden_states` of inner layers are float32. Casting at the layer and not at the embedding
keeps rotary tables and masks in the compute dtype.

## Numerics
equivalent: the same function, with one rounding less at every addition. The additions cannot overflow and
are exact to float32; matrix products are unchanged.

## Known limits
Gemma 3 was tried with real weights; most other architectures only as tiny random models whose stream was made to
overflow. A projection whose own output passes 65,504 is not mended. Whether this model's stream does overflow is not
asked: every float16 stream of a served architecture is widened.
Refused for layers or norms whose forward somebody else wrote. PEFT's AdaptionPrompt added after the patch
calls the projections past the casts: add it first. A function of your own compiled around the model and
called before the patch goes on running the code it made; call `torch._dynamo.reset()`.
Not served yet: norms whose kernels want input and weight of one dtype (torch's LayerNorm), and streams
that modules other than layers read (Gemma 3n, Gemma 4). Nothing here outlives `save_pretrained`: a server
that loads the checkpoint must patch it too.

## Sources
huggingface/transformers#36822, huggingface/transformers#39972 (symptom); measured on Gemma 3 270M with
`benchmarks/gemma_fp16.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.patching import edits, select
from hfpatch.patching.language import Case, Needed, NotNeeded, Patch, Refused, Upstream, Verdict

if TYPE_CHECKING:
    from hfpatch.patching.context import Context
    from hfpatch.patching.trial import Trial

GEMMA = ("gemma2", "gemma3_text")
GATED = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "cohere", "cohere2", "ernie4_5", "granite", "helium",
    "hunyuan_v1_dense", "ministral", "olmo", "seed_oss", "smollm3",
)  # fmt: skip
FUSED = ("phi3", "glm")
UNGATED = ("arcee", "apertus")
DERIVED = (
    "afmoe", "apertus1p5_text", "aria_text", "axk1", "bailing_hybrid", "bamba", "bitnet", "cohere2_moe",
    "cohere_compass_text", "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32", "diffllama", "doge", "dots1",
    "dots3_note_text", "ernie4_5_moe", "exaone", "exaone_moe", "falcon_h1", "flint", "glm4", "glm4_moe",
    "glm4_moe_lite", "glm_moe_dsa", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared",
    "hunyuan_v1_moe", "hy_v3", "hyperclovax", "inkling_text", "internlm3", "iquestcoder", "jamba", "jetmoe",
    "kimi_linear", "kolibri1", "laguna", "lara_mini", "llama4_text", "mellum", "mimo_v2_flash", "minimax_m2",
    "minimax_m3_vl_text", "ministral3", "mixtral", "nanochat", "olmoe", "phi4_multimodal", "qwen3_moe",
    "recurrent_gemma", "sarvam_mla", "sarvam_moe", "solar_open", "vaultgemma", "xlstm", "youtu",
)  # fmt: skip
"""Proved on tiny models only, whose weights `Case(overflow=True)` scales by their roles."""

LAYER_BODIES = (  # transformers 5.17, then 5.24
    "8730c8be1de9", "85f10e34a98f",  # sandwich norms (Gemma 2 and 3)
    "f634ba73a07f", "3c942e335901",  # pre-norm (Llama and most)
    "ad4117f0a24d", "eee40f368455", "18ce8c997897", "f3524e68748a",  # parallel branches (Cohere)
    "626b6a0f6852", "a1a7045af43e",  # scaled branches (Granite)
    "3ef3bf3931a2", "7e405834c751",  # dropped-out branches (Phi-3)
    "9392474cc48a", "b248046644b1",  # renamed norms (Apertus)
    # transformers 5.24; another release is proved in the plan, on a tiny model
    "c82f816dc1aa", "f2942ca5e8f1", "e313c544532e",  # sandwich norms (AFMoE, GLM-4, MiniMax M3)
    "3d2555b16975", "2d822e762b21", "f416ee636206", "3b5ab36602f6", "3a1c9f4036be",  # mixtures of experts
    "ab1eb805c94c", "008f78494cf9", "e7e76364712d", "917e8368cf34", "b7e72fff7bcc",  # hybrids
    "466114ec9b42", "102ce59ecf7b",  # recurrent (RecurrentGemma, xLSTM)
    "7033d8b10a1c", "0956f8aac016", "2e6de48ecccf", "2d6915db3ba8", "54fcddebf751",  # others
)  # fmt: skip
NORM_BODIES = (
    "7a85307ddc1d", "715bd3b9e51a", "85b2b02a8d29", "66de34439d41", "b03e6cdc86b3",
    "be17354b2704", "7febdb80462c", "3e75e9d8cdcc", "b88edc1ab0ce",
)  # fmt: skip

TORCH_NORMS = "torch.nn.modules.normalization"
POST_NORM = "attention and MLP read the raw stream, their norms come after them; run it in bfloat16"


def condition(context: Context) -> Verdict:
    """Needed where the stream is, or is planned to be, float16."""
    stack = context.stack
    if stack is None or stack.final_norm is None or context.stream_dtype is None:
        return Refused("no list of decoder layers with a final norm and weights was found")
    now, planned = str(context.stream_dtype).removeprefix("torch."), context.compute_dtype
    dtype = now if planned is None else str(planned).removeprefix("torch.")
    if dtype != "float16":
        return NotNeeded(f"the residual stream is {dtype}, whose range holds it")
    norms = (*stack.layer_norms, stack.final_norm)
    strict = [path for path, norm in norms if any(type(m).__module__.startswith(TORCH_NORMS) for m in norm.modules())]
    if strict:
        return Refused(f"{strict[0]} is a torch norm, which wants its input in the dtype of its weight")
    sharded = [path for path, layer in stack.layers if _casts_back(layer)]
    if sharded:
        return Refused(f"{sharded[0]}: FSDP casts the layer's input back; wrap with cast_forward_inputs=False")
    is_now = "is" if now == dtype else f"is {now} and planned to be"
    return Needed(f"the residual stream {is_now} float16: it cannot hold more than 65,504")


def symptom(trial: Trial) -> str | None:
    """Non-finite logits, or logits farther from float32 than bfloat16's."""
    logits = trial.logits()
    bad = int((~logits.isfinite()).sum())
    if bad:
        return f"{bad} of {logits.numel()} logits are not finite"
    error, bfloat16 = trial.error(logits), trial.error(trial.bfloat16)
    return None if error < bfloat16 else f"relative error {error:.1e}, bfloat16 has {bfloat16:.1e}"


def _casts_back(layer: object) -> bool:
    state = getattr(layer, "_get_fsdp_state", None)
    policy = getattr(state(), "_mp_policy", None) if callable(state) else None
    return bool(policy and policy.param_dtype is not None and policy.cast_forward_inputs)


def _overflowing(architecture: str) -> Case:
    """Sixteen layers whose branches are finite in float16 and whose sum is not."""
    if architecture in DERIVED:
        return Case(architecture, "float16", config={"num_hidden_layers": 16}, overflow=True)
    scale = {"*.down_proj.weight": 1.5e3, "*.up_proj.weight": 50.0, "*.gate_proj.weight": 50.0}
    if architecture in GEMMA:
        return Case(architecture, "float16", fill={"*post_feedforward_layernorm.weight": 24000.0})
    if architecture in FUSED:
        scale = {"*.down_proj.weight": 1.5e3, "*.gate_up_proj.weight": 50.0}
    if architecture in UNGATED:
        del scale["*.gate_proj.weight"]
    return Case(architecture, "float16", scale=scale, config={"num_hidden_layers": 16})


PATCH = Patch(
    title="Residual stream in float32, branches in float16",
    architectures=(*GEMMA, *GATED, *FUSED, *UNGATED, *DERIVED),
    condition=condition,
    edits=(
        edits.cast_input(select.first_layer(), to="float32"),
        edits.cast_input(select.branch_out_norms(), to="float32"),
        edits.cast_input(select.branches(), to="weights"),
        edits.cast_output(select.final_norm(), to="weights"),
    ),
    effect="equivalent",
    tolerance=4e-3,
    upstream=(
        Upstream(select.layers(), LAYER_BODIES),
        Upstream(select.layer_norms(), NORM_BODIES),
    ),
    symptom=symptom,
    repros=tuple(_overflowing(name) for name in (*GEMMA, *GATED, *FUSED, *UNGATED, *DERIVED)),
    leaves_alone=(
        Case("gemma3_text", dtype="bfloat16"),
        Case("gemma3_text", dtype="float32", autocast="float16"),
    ),
    refuses={
        "gemma3n_text": "gates and AltUp read the raw stream; run it in bfloat16",
        "gemma4_text": "per-layer inputs and gates read the raw stream; run it in bfloat16",
        "olmo2": POST_NORM,
        "olmo3": POST_NORM,
        "exaone4": POST_NORM,
    },
    suggests="stock alternatives: bfloat16 weights, or float32 weights under float16 autocast",
    answers=("residual-overflow",),
)
