"""Runs the residual stream in float32 where float16 cannot hold it.

## What goes wrong
Every decoder layer adds its branches to one running sum, the residual stream. In some models that sum
passes 65,504, the largest float16, though no projection does: the addition gives inf, the next norm
turns it into NaN, and the loss is NaN at every step. Gemma 3 270M's stream reaches about 1e5, so the model
is unusable when cast to float16, with and without autocast, with eager and sdpa attention.

T5's feed-forward parts put out more than 65,504 by themselves. transformers keeps their last map, `wo`, in float32 for
that, and clamps what is float16 nevertheless. float16 autocast undoes the one and escapes the other: `wo` puts out inf.

## What this changes
The input of the first decoder layer is cast to float32, and the norms of the layers then write float32; torch's own
norms, whose kernels want input and weight in one dtype, compute in float32. A norm after a branch (Gemma 2 and 3) is
given float32 too: what it adds can pass 65,504 by itself. Attention and MLP get their input cast back to the dtype of
their own weights, and the final norm's output is cast back too. An encoder and a decoder are each treated so. T5's `wo`
computes in float32 and outside autocast, whatever its weights are in; so do your own maps and norms around a layer.

Weights, state dict and the dtype of `last_hidden_state` and of the KV cache stay as they are; `hidden_states` of inner
layers are float32. Casting at the layer and not at the embedding keeps rotary tables and masks in the compute dtype.

## Numerics
equivalent: the same function, with one rounding less at every addition. The additions cannot overflow and
are exact to float32; matrix products are unchanged.

## Known limits
Gemma 3 was tried with real weights; most other architectures only as tiny random models whose stream was made to
overflow. A projection whose own output passes 65,504 is not mended. Whether this model's stream does overflow is not
asked: every float16 stream of a served architecture is widened. Refused for layers or norms whose forward somebody
else wrote, and for a module around a layer that, tried alone, does not compute on a float32 stream what it computes
in float32. Add PEFT's AdaptionPrompt before the patch: it calls the projections past the casts. Where a function that
you compiled around the model was called before the patch, call `torch._dynamo.reset()`. Layers that FSDP2 wraps later
with a policy that casts the stream back raise at the first call. Not served: streams that are read before any norm
(Gemma 3n, Gemma 4, OLMo 2), and layers that cast the stream to their norm's dtype (Mamba). Nothing here outlives
`save_pretrained`: a server that loads the checkpoint must patch it too.

## Sources
huggingface/transformers#36822, huggingface/transformers#39972 (symptom); measured on Gemma 3 270M with
`benchmarks/gemma_fp16.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.dtypes import dtype_name
from hfpatch.patching import edits, select
from hfpatch.patching.language import Case, Needed, NotNeeded, Patch, Refused, Upstream, Verdict

if TYPE_CHECKING:
    from hfpatch.patching.context import Context
    from hfpatch.patching.verifying.trial import Trial

ARCHITECTURES = (
    "afmoe", "apertus", "apertus1p5_text", "arcee", "aria_text", "axk1", "bailing_hybrid", "bamba",
    "bigbird_pegasus", "biogpt", "bitnet", "blenderbot", "bloom", "codegen", "cohere", "cohere2", "cohere2_moe",
    "cohere_compass_text", "cosmos3_edge_text", "ctrl", "cwm", "deepseek_ocr2_text", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "diffllama", "doge", "dots1", "dots3_note_text", "emu3_text_model", "ernie4_5", "ernie4_5_moe",
    "ernie4_5_vl_moe_text", "exaone", "exaone_moe", "falcon", "falcon_h1", "flint", "gemma", "gemma2",
    "gemma3_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text",
    "glm4v_text", "glm_moe_dsa", "glm_ocr_text", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese",
    "gpt_oss", "gptj", "granite", "granite4_vision_text", "granite_swa", "granitemoe", "granitemoe_swa",
    "granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text",
    "hy_v3", "hyperclovax", "inkling_text", "internlm3", "iquestcoder", "jais2", "jamba", "jetmoe", "kimi_linear",
    "kolibri1", "kosmos_2_5_text_model", "laguna", "lara_mini", "lfm2", "lfm2_moe", "lfm3", "llama", "llama4_text",
    "m2m_100", "mbart", "mellum", "mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3",
    "mistral", "mistral4", "mistral_large4_text", "mixtral", "mllama_text_model", "modernbert-decoder", "moshi",
    "mpt", "muse_glimmer_text", "nanochat", "nemotron", "nllb-moe", "olmo", "olmoe", "opt", "paddleocr_vl_text",
    "pegasus", "persimmon", "phi", "phi3", "phi4_multimodal", "phimoe", "pp_formulanet_text", "qwen2",
    "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text",
    "recurrent_gemma", "sarvam_mla", "sarvam_moe", "seamless_m4t", "seamless_m4t_v2", "seed_oss", "smollm3",
    "solar_open", "stablelm", "starcoder2", "step3p5", "t5_gemma_module", "t5gemma2_decoder", "t5gemma2_text",
    "unlimited_ocr_text", "vaultgemma", "whisper", "xglm", "xlstm", "youtu",
)  # fmt: skip
"""Gemma 3 was tried with real weights, the others on tiny models whose weights are scaled by their roles."""

FOUR_LAYERS = frozenset({"deepseek_ocr2_text", "gemma4_unified_text", "gpt_neo", "granitemoehybrid", "lfm2_moe"})
"""Their configs say something of each layer: only the depth of the tiny model will do."""

T5 = ("t5", "mt5", "umt5", "longt5")

LAYER_BODIES = (  # of transformers 5.24, some of 5.17; others are proved in the plan, on a tiny model
    "8730c8be1de9", "85f10e34a98f", "f634ba73a07f", "3c942e335901", "ad4117f0a24d", "eee40f368455", "18ce8c997897",
    "f3524e68748a", "626b6a0f6852", "a1a7045af43e", "3ef3bf3931a2", "7e405834c751", "9392474cc48a", "b248046644b1",
    "c82f816dc1aa", "f2942ca5e8f1", "e313c544532e", "3d2555b16975", "2d822e762b21", "f416ee636206", "3b5ab36602f6",
    "3a1c9f4036be", "ab1eb805c94c", "008f78494cf9", "e7e76364712d", "917e8368cf34", "b7e72fff7bcc", "466114ec9b42",
    "102ce59ecf7b", "7033d8b10a1c", "0956f8aac016", "2e6de48ecccf", "2d6915db3ba8", "54fcddebf751", "3bad8b94614f",
    "3cd9e8842f01", "a7df47e45dcf", "40ef44e83858", "e2b3409debeb", "2bcb01221f81", "4e1ccf774608", "f780a4ed765a",
    "b1a5d8c9d0e3", "b92e6c9d89fb", "9a25f6dd0674", "281d696f61e3", "12895497daf4", "66320771b8cc", "6270cde74c54",
    "094ac9c8e533", "3960cca7eb45", "a80359096f3e", "faa979977e5a", "b800a34179c1", "1113133396e3", "cbb020b33331",
    "bc52196fdb20", "a8af9b7e8676", "d79365d6a1cb", "8cfa93bf1a0e", "5443dad99349", "017aee9dd46a", "001d8c0648d3",
    "93af15fe62d7", "91ed970d473f", "a1ad2adf2c1f", "ace70a2c4faf", "dde6b93812ff", "212b4da693e9", "a384403e9cb4",
    "cd2d123f7275", "7ca4855a7915", "ae047ced1926", "af0ff1b25c2a", "ac211dea42dc", "045119eb0201", "7a4ff1b9cf32",
    "fb186d4a28f0", "209ed8149b33", "bf2cb2c7c2d7", "35cb784479d4", "e485b7254d30", "1b58e0c1d161",
)  # fmt: skip
NORM_BODIES = (  # the same
    "7a85307ddc1d", "715bd3b9e51a", "85b2b02a8d29", "66de34439d41", "b03e6cdc86b3", "be17354b2704", "7febdb80462c",
    "3e75e9d8cdcc", "b88edc1ab0ce", "656d01d0ff1c", "9f0269dc9fdb", "54de1173744b", "7b8ae100357a", "92f619221c7f",
)  # fmt: skip

KEPT_IN_FLOAT32 = "wo"
"""The last map of a feed-forward part of T5: transformers keeps it in float32, where nobody casts the model."""

NORMALISED = (
    "bart", "bert", "bert-generation", "big_bird", "blenderbot-small", "camembert", "data2vec-text", "electra",
    "ernie", "fsmt", "git", "led", "marian", "minimax", "mvp", "openai-gpt", "plbart", "prophetnet", "rembert",
    "roberta", "roc_bert", "roformer", "trocr", "xlm", "xlm-roberta", "xlnet", "xmod",
)  # fmt: skip
NORMALISES = "its layers normalise every sum at once, so no stream grows from layer to layer"
NORM_INSIDE = "attention reads the raw stream, its norm is inside; run it in bfloat16"
CASTS_STREAM = "its layers cast the stream to their norm's dtype; run it in bfloat16"
POST_NORM = "attention and MLP read the raw stream, their norms come after them; run it in bfloat16"


def condition(context: Context) -> Verdict:
    """Needed where the stream is, or is planned to be, float16."""
    from hfpatch.model.roles import unread
    from hfpatch.patching.stand_ins.wrapped import obstacle

    if context.submodel is not None and context.submodel.architecture in NORMALISED:
        return NotNeeded(NORMALISES)
    if not context.stacks and context.dtype != "float16":
        return NotNeeded(f"it computes in {context.dtype}, whose range holds a residual stream")
    if not context.stacks or any(s.final_norm is None for s in context.stacks) or context.stream_dtype is None:
        hidden = context.submodel and not context.stacks and unread(context.survey, context.submodel)
        return Refused(hidden or "no list of decoder layers with a final norm and weights was found")
    now, planned = dtype_name(context.stream_dtype), context.compute_dtype
    dtype = now if planned is None else dtype_name(planned)
    if dtype == "float32" and select.branch_maps(KEPT_IN_FLOAT32).count(context):
        return Needed(f"float16 autocast would round what {KEPT_IN_FLOAT32} puts out; without it nothing changes")
    if dtype != "float16":
        return NotNeeded(f"the residual stream is {dtype}, whose range holds it")
    if why := obstacle(context.stacks, planned):
        return Refused(why)
    is_now = "is" if now == dtype else f"is {now} and planned to be"
    return Needed(f"the residual stream {is_now} float16: it cannot hold more than 65,504")


def symptom(trial: Trial) -> str | None:
    """Non-finite logits, or logits farther from float32 than bfloat16's."""
    logits = trial.logits()
    if bad := int((~logits.isfinite()).sum()):
        return f"{bad} of {logits.numel()} logits are not finite"
    error, bfloat16 = trial.error(logits), trial.error(trial.bfloat16)
    return None if error < bfloat16 else f"relative error {error:.1e}, bfloat16 has {bfloat16:.1e}"


def _overflowing(architecture: str) -> Case:
    """Sixteen layers whose branches are finite in float16 and whose sum is not."""
    config = {} if architecture in FOUR_LAYERS else {"num_hidden_layers": 16}
    return Case(architecture, "float16", config=config, overflow=True)


def _under_autocast(architecture: str) -> Case:
    """float32 weights whose feed-forward parts put out what float16 autocast cannot hold."""
    return Case(architecture, autocast="float16", scale={"*.wo.weight": 1e7})


def _clamped(architecture: str) -> Case:
    """Everything in float16: T5 clamps what does not fit, which is finite and wrong."""
    return Case(architecture, "float16", scale={"*.wo.weight": 3e4, "*.wi*.weight": 3.0})


PATCH = Patch(
    title="Residual stream in float32, branches in float16",
    architectures=(*ARCHITECTURES, *T5),
    condition=condition,
    edits=(
        edits.cast_input(select.first_layer(), to="float32"),
        edits.cast_input(select.branch_out_norms(), to="float32"),
        edits.in_float32(select.torch_norms()),
        edits.in_float32(select.maps_around()),
        edits.cast_input(select.parts_around(), to="weights"),
        edits.cast_input(select.branches(), to="weights"),
        edits.in_float32(select.branch_maps(KEPT_IN_FLOAT32)),
        edits.cast_output(select.final_norm(), to="weights"),
    ),
    effect="equivalent",
    tolerance=6e-3,
    upstream=(
        Upstream(select.layers(), LAYER_BODIES),
        Upstream(select.layer_norms(), NORM_BODIES),
    ),
    symptom=symptom,
    repros=(*map(_overflowing, ARCHITECTURES), *map(_under_autocast, T5), *map(_clamped, T5)),
    leaves_alone=(Case("gemma3_text", dtype="bfloat16"), Case("gemma3_text", dtype="float32", autocast="float16")),
    refuses={
        "gemma3n_text": "gates and AltUp read the raw stream; run it in bfloat16",
        "gemma4_text": "per-layer inputs and gates read the raw stream; run it in bfloat16",
        "switch_transformers": "experts sum their outputs in float16; run it in bfloat16",
        **dict.fromkeys(("olmo2", "olmo3", "olmo_hybrid", "flex_olmo", "exaone4"), POST_NORM),
        **dict.fromkeys(("megatron-bert", "xlm-roberta-xl", "roberta-prelayernorm"), NORM_INSIDE),
        **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "nemotron_h"), CASTS_STREAM),
        **dict.fromkeys(NORMALISED, NORMALISES),
    },
    suggests="stock alternatives: bfloat16 weights, or (but for T5) float32 weights under float16 autocast",
    answers=("residual-overflow",),
    answers_where_it_edits=("overflow", "cast-overflow"),
)
