"""Runs the residual stream in float32 if float16 cannot hold it.

## What goes wrong
Every decoder layer adds its branches to one running sum, the residual stream. In some models that sum
exceeds 65,504, the largest float16, although no projection does: the addition gives inf, the next norm
turns it into NaN, and the loss is NaN at every step. Gemma 3 270M's stream reaches about 1e5, so the model
is unusable when cast to float16, with and without autocast, with eager and sdpa attention.

## What this changes
The input of the first decoder layer is cast to float32, and the norms of the layers then write float32; torch's own
norms, whose kernels need input and weight in one dtype, compute in float32. A norm after a branch (Gemma 2 and 3) gets
float32 input too: its output alone can exceed 65,504. The inputs of attention and MLP are cast back to the dtype of
their weights, and so is the final norm's output. This applies to an encoder and to a decoder. Your own maps and norms
around a layer compute in float32 and outside autocast.

Weights, state dict and the dtype of `last_hidden_state` and of the KV cache stay as they are; `hidden_states` of inner
layers are float32. The cast at the layer, not at the embedding, keeps rotary tables and masks in the compute dtype.

## Numerics
equivalent: the same function, with one rounding fewer at every addition. The additions cannot overflow and
are exact to float32; matrix products are unchanged.

## Known limits
Gemma 3 was tested with real weights, most other architectures only as tiny random models whose stream was made to
overflow. A projection whose own output exceeds 65,504 is not fixed (T5's is, by `wo-overflow`). The patch does not test
whether this model's stream overflows: it widens every float16 stream of an architecture that is proved. Refused for
layers or norms with a foreign forward, and for a module around a layer whose result on a float32 stream, in a test run,
is not that of float32. Add PEFT's AdaptionPrompt before the patch: it calls the projections without the casts. If a
function that you compiled around the model was called before the patch, call `torch._dynamo.reset()`. Layers that FSDP2
wraps later with a policy that casts the stream back raise at the first call. Not served: streams that are read before
any norm (Gemma 3n, Gemma 4, OLMo 2), and layers that cast the stream to their norm's dtype (Mamba). `save_pretrained`
does not save the patch: a server that loads the checkpoint must apply it too.

## Sources
huggingface/transformers#36822, huggingface/transformers#39972 (symptom); measured on Gemma 3 270M with
`benchmarks/gemma_fp16.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.dtypes import dtype_name
from hfpatch.patching import edits, select
from hfpatch.patching.language import ANY, Case, Needed, NotNeeded, Patch, Refused, Structure, Verdict
from hfpatch.patching.verifying.wrong_logits import wrong_logits

if TYPE_CHECKING:
    from hfpatch.patching.context import Context

POST_NORM = "attention and MLP read the raw stream, their norms come after them; run it in bfloat16"
NORM_INSIDE = "attention reads the raw stream, its norm is inside; run it in bfloat16"
CASTS_STREAM = "its layers cast the stream to their norm's dtype; run it in bfloat16"
FRAMES = {"max_source_positions": 16}
"""Whisper's encoder takes no other length than this; an example has 32 frames, and it halves them."""
T5 = NotNeeded("wo-overflow is for this architecture: it keeps the output of wo, and so the stream, in float32")


def why_not(context: Context) -> str:
    """Why a submodel has no stack of decoder layers that ends in a norm; empty if it has."""
    from hfpatch.model.roles import why_unreadable

    if context.stacks and all(s.final_norm for s in context.stacks) and context.stream_dtype is not None:
        return ""
    hidden = context.submodel and not context.stacks and why_unreadable(context.survey, context.submodel)
    return hidden or "no list of decoder layers with a final norm and weights was found"


def condition(context: Context) -> Verdict:
    """Needed if the stream is, or is planned to be, float16."""
    from hfpatch.patching.stand_ins.wrapped import obstacle

    now, planned = dtype_name(context.stream_dtype) if context.stacks else context.dtype, context.compute_dtype
    dtype = now if planned is None else dtype_name(planned)
    if dtype != "float16":
        return NotNeeded(f"the residual stream is {dtype}, whose range holds it")
    if why := obstacle(context.stacks, planned):
        return Refused(why)
    is_now = "is" if now == dtype else f"is {now} and planned to be"
    return Needed(f"the residual stream {is_now} float16: it cannot hold more than 65,504")


PATCH = Patch(
    title="Residual stream in float32, branches in float16",
    serves=Structure("stacks of decoder layers that end in a norm", why_not),
    condition=condition,
    edits=(
        edits.cast_input(select.first_layer(), to="float32"),
        edits.cast_input(select.branch_out_norms(), to="float32"),
        edits.in_float32(select.torch_norms()),
        edits.in_float32(select.maps_around()),
        edits.cast_input(select.parts_around(), to="weights"),
        edits.cast_input(select.branches(), to="weights"),
        edits.cast_output(select.final_norm(), to="weights"),
    ),
    effect="equivalent",
    tolerance=6e-3,
    depends_on=(select.layers(), select.layer_norms()),
    symptom=wrong_logits,
    repros=(
        Case(ANY, "float16", layers=16, overflow=True),
        Case("whisper", "float16", config=FRAMES, layers=16, cls="WhisperForConditionalGeneration", overflow=True),
    ),
    leaves_alone=(Case("gemma3_text", dtype="bfloat16"), Case("gemma3_text", dtype="float32", autocast="float16")),
    but={
        **dict.fromkeys(("t5", "mt5", "umt5", "longt5"), T5),
        "gemma3n_text": "gates and AltUp read the raw stream; run it in bfloat16",
        "gemma4_text": "per-layer inputs and gates read the raw stream; run it in bfloat16",
        "switch_transformers": "experts sum their outputs in float16; run it in bfloat16",
        **dict.fromkeys(("olmo2", "olmo3", "olmo_hybrid", "flex_olmo", "exaone4"), POST_NORM),
        **dict.fromkeys(("megatron-bert", "xlm-roberta-xl", "roberta-prelayernorm"), NORM_INSIDE),
        **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "nemotron_h"), CASTS_STREAM),
    },
    suggests="stock alternatives: bfloat16 weights, or float32 weights under float16 autocast",
    answers=("residual-overflow",),
    answers_where_it_edits=("overflow", "cast-overflow"),
)
