"""Runs the last map of T5's feed-forward parts in float32.

The outputs of T5's feed-forward parts (`wo`) pass 65,504 in float16 and under float16 autocast. They are computed in
float32. By default: yes.

## What goes wrong
The outputs of T5's feed-forward parts alone exceed 65,504, the largest float16. transformers therefore keeps their last
map, `wo`, in float32 when it loads a checkpoint, and clamps float16 values. float16 autocast computes `wo` in float16
all the same, before the clamp: its output is inf. `.half()` casts `wo` too: what overflows is clamped, so the logits
are finite and wrong.

## What this changes
`wo` computes in float32 and outside autocast, in any dtype of its weights. Its output is float32, and so is the
residual stream from the first `wo` on: it no longer overflows either. The norms cast what the next part reads back.

## Numerics
equivalent: the same function, with one rounding fewer. It is exact to float32 in `wo` and in the sums that follow.

## Known limits
Tested on tiny random models whose `wo` was made to overflow, not on real weights. It does not test whether this
model's `wo` overflows. In float32 without autocast it changes nothing. Not for Switch Transformers, whose experts sum
their outputs in float16: `fp16-residual-overflow` widens its stream and `fp16-branch-overflow`, if a batch shows the
need, its experts; under float16 autocast of float32 weights no patch does.

## Sources
huggingface/transformers#20287 (`wo` stays in float32); huggingface/transformers#9295 (the clamp).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.dtypes import dtype_name
from hfpatch.patching import edits, select
from hfpatch.patching.language import ANY, Case, Needed, NotNeeded, Patch, Structure, Verdict
from hfpatch.patching.verifying.wrong_logits import wrong_logits

if TYPE_CHECKING:
    from hfpatch.patching.context import Context

WO = "wo"
SWITCH = NotNeeded(
    "other patches are for this architecture: fp16-residual-overflow widens its stream, and fp16-branch-overflow its "
    "experts if a batch shows the need; under float16 autocast of float32 weights no patch does"
)


def why_not(context: Context) -> str:
    """Why a submodel has no feed-forward part that ends in `wo`; empty if it has one."""
    return "" if select.branch_maps(WO).count(context) else f"no linear map {WO} in a layer was found"


def condition(context: Context) -> Verdict:
    """Needed in float16, and in float32 for float16 autocast."""
    now = dtype_name(context.stream_dtype)
    dtype = now if context.compute_dtype is None else dtype_name(context.compute_dtype)
    if why := why_not(context):
        return NotNeeded(why)
    if dtype == "float32":
        return Needed(f"float16 autocast would round the output of {WO}; without autocast nothing changes")
    if dtype != "float16":
        return NotNeeded(f"{WO} computes in {dtype}, whose range holds its output")
    return Needed(f"the output of {WO} is added to a float16 stream, which cannot hold more than 65,504")


PATCH = Patch(
    title="T5's wo, and with it the residual stream, in float32",
    serves=Structure("layers whose feed-forward part ends in the map wo", why_not),
    condition=condition,
    edits=(edits.in_float32(select.branch_maps(WO)),),
    effect="equivalent",
    tolerance=6e-3,
    depends_on=(select.layers(), select.layer_norms()),
    symptom=wrong_logits,
    repros=(
        Case(ANY, autocast="float16", scale={"*.wo.weight": 1e7}),
        Case(ANY, "float16", scale={"*.wo.weight": 3e4, "*.wi*.weight": 3.0}),
        Case("t5", "float16", layers=16, overflow=True),
    ),
    leaves_alone=(Case("t5", dtype="bfloat16"), Case("llama", dtype="float16")),
    but={"switch_transformers": SWITCH},
    suggests="stock alternative: bfloat16 weights",
    answers=("residual-overflow",),
    answers_where_it_edits=("overflow", "cast-overflow"),
)
