"""Runs the residual stream in float32 if float16 cannot hold it.

The residual stream of Gemma 2 and 3 and of most other architectures (encoders, image and sound towers too) can pass
65,504 and become NaN in float16. It runs in float32; the branches stay in float16. An architecture without a proof is
tried on a tiny model of its own. By default: yes.

## What goes wrong
Every layer adds its branches to one running sum, the residual stream. In some models that sum
exceeds 65,504, the largest float16, although no projection does: the addition gives inf, the next norm
turns it into NaN, and the loss is NaN at every step. Gemma 3 270M's stream reaches about 1e5, so the model
is unusable when cast to float16, with and without autocast, with eager and sdpa attention. Image and sound towers
have such a stream too. Some clamp it (Whisper's encoder, Qwen2-Audio's): their output is finite and wrong.

## What this changes
The input of the first layer is cast to float32, and the norms of the layers then write float32; torch's own
norms, whose kernels need input and weight in one dtype, compute in float32. A norm after a branch (Gemma 2 and 3) gets
float32 input too: its output alone can exceed 65,504. The inputs of attention and MLP are cast back to the dtype of
their weights, and so is the final norm's output. This applies to every stack: an encoder, a decoder, a tower. Your own
maps and norms around a layer compute in float32 and outside autocast.

- A branch that begins with a norm of its own (Megatron-BERT, conformers) is cast after that norm.
- A branch that reads the stream without a norm (OLMo 2, Gemma 4's gates) computes in float32. Only there the products
  cost more, and training keeps its weights in float32 until the backward pass.
- A layer that casts the stream itself (Mamba) gets it as a tensor that such casts leave in float32.
- Beyond a tower without a final norm, maps and norms compute in float32 if their input is float32, and return the dtype
  of their weights: LLaVA's projector reads CLIP's stream as it is.

Weights, state dict and the KV cache stay as they are, and so does the dtype of `last_hidden_state` if a norm ends the
stream; without one (CLIP's image tower) it is float32. `hidden_states` of inner layers are float32. The cast at the
layer, not at the embedding, keeps rotary tables and masks in the compute dtype.

## Numerics
equivalent: the same function, with one rounding fewer at every addition. The additions cannot overflow and
are exact to float32; matrix products are unchanged, or exact to float32 where they read the stream itself.

## Known limits
Gemma 3 was tested with real weights, most other architectures only as tiny random models whose stream was made to
overflow. A projection whose own output exceeds 65,504 is not fixed (T5's is, by `wo-overflow`). The patch does not test
whether this model's stream overflows: it widens every float16 stream of an architecture that is proved. Refused for
layers or norms with a foreign forward, and for a module around a layer whose result on a float32 stream, in a test run,
is not that of float32. Add PEFT's AdaptionPrompt before the patch: it calls the projections without the casts. If a
function that you compiled around the model was called before the patch, call `torch._dynamo.reset()`. Layers that FSDP2
wraps later with a policy that casts the stream back raise at the first call. Your own code that casts a tower's raw
stream to float16 makes it inf: pass it to a layer as it is. Not cured: code outside the layers that casts the stream
(Gemma 4's image pooling, Gemma 3n's AltUp), experts that read the raw stream (FlexOlmo). `save_pretrained`
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

FRAMES = {"max_source_positions": 16}
"""Whisper's encoder takes no other length than this; an example has 32 frames, and it halves them."""
T5 = NotNeeded("wo-overflow is for this architecture: it keeps the output of wo, and so the stream, in float32")


def why_not(context: Context) -> str:
    """Why a submodel has no stack of layers whose norms read the residual stream; empty if it has."""
    from hfpatch.model.roles import why_unreadable

    if context.stacks and context.stream_dtype is not None:
        return ""
    hidden = context.submodel and not context.stacks and why_unreadable(context.survey, context.submodel)
    return hidden or "no list of layers with norms and weights was found"


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
    serves=Structure("stacks of layers whose norms read the residual stream", why_not),
    condition=condition,
    edits=(
        edits.cast_input(select.first_layer(), to="float32"),
        edits.cast_input(select.branch_out_norms(), to="float32"),
        edits.in_float32(select.torch_norms()),
        edits.in_float32(select.raw_maps()),
        edits.keep_float32(select.casting_layers()),
        edits.in_float32(select.maps_around()),
        edits.cast_input(select.parts_around(), to="weights"),
        edits.cast_input(select.readers(), to="weights"),
        edits.cast_output(select.final_norm(), to="weights"),
        edits.read_stream(select.stream_ends()),
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
    but=dict.fromkeys(("t5", "mt5", "umt5", "longt5"), T5),
    suggests="stock alternatives: bfloat16 weights, or float32 weights under float16 autocast",
    answers=("residual-overflow",),
    answers_where_it_edits=("overflow", "cast-overflow"),
)
