"""Computes branches that float16 cannot hold with values a power of two smaller, or in float32.

Inside an MLP or an expert, or in what an attention's `o_proj` writes, a value passes 65,504 although the stream is
float32. The part runs with values a power of two smaller, or in float32. `plan` and `apply` with `batch=` measure the
need. By default: if a batch shows it.

## What goes wrong
Inside an MLP or an expert, the product of gate and up, the activation, or what the last map writes, passes 65,504, the
largest float16. So may what an attention's last map (`o_proj`) writes. It is inf before it reaches the residual stream,
so a stream in float32 does not help.

## What this changes
A gated MLP and experts: the output of the activation is multiplied by 2^-k, and the output of the part, in float32, by
2^k. All that lies between, adapters and quantised maps too, computes with values smaller by this factor. k leaves the
largest value of the batch room for 16 times as much; without a batch it is 3. Where that would be wrong or would not
help (a bias in the last map, no gate, a map before the activation that overflows itself), everything in the part
computes in float32, outside autocast: slower. The hooks are on the activation and on the part, which no adapter
replaces.

The last map of an attention: its input is multiplied by 2^-k and its output, in float32, by 2^k; with a bias it
computes in float32. The hooks are on the map itself, inside an adapter, which gets its input as it is and adds to the
float32 output.

With `batch=` only parts and maps whose values come within a factor of 2 of 65,504 are changed.

## Numerics
equivalent: a power of two changes no digit, but values below 6e-5 times 2^k lose some or all of theirs. Gradients
inside the part are 2^k times as large as in a stock model, so a GradScaler's scale may settle lower.

## Known limits
It needs `fp16-residual-overflow`: the output of the part is float32 and is added to the stream. It runs only by name,
or if a batch shows the need; one text does not show what another reaches. Not served: an attention's other maps (if one
passes 65,504 on the batch, the patch is refused and names it); quantised maps that would have to compute in float32. A
quantised map that casts to float16 itself hides what comes after its first overflow from the measurement: name the
patch to change all parts. If the MLP's maps are the layer's own children (OPT, Whisper), and around an attention's last
map, keep a LoRA adapter in float32 and outside float16 autocast if what it adds may pass 65,504 itself. A part whose
activation does not run (fused kernels), or that gains a bias, raises an error. `save_pretrained` does not save the
patch.

## Sources
huggingface/transformers#27179 (Llama, the product), ggml-org/llama.cpp#17534, unslothai/unsloth-zoo#866 (experts);
measured on tiny models of each architecture by `hfpatch prove fp16-branch-overflow`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hfpatch.dtypes import dtype_name
from hfpatch.patching import edits, select
from hfpatch.patching.branches import (
    changed_by,
    chosen,
    end_in_force,
    ends_of,
    exponent,
    in_force,
    lost,
    near_limit,
    parts_of,
    peak_at,
    way_of,
    way_of_end,
    why_end_impossible,
    why_impossible,
)
from hfpatch.patching.context import Context, Target
from hfpatch.patching.language import ANY, Case, Needed, NotNeeded, Offered, Patch, Refused, Structure, Verdict
from hfpatch.patching.verifying.wrong_logits import wrong_logits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


T5 = NotNeeded("wo-overflow is for this architecture: it computes wo in float32")


def why_not(context: Context) -> str:
    """Why a submodel has no feed-forward parts that can be changed; empty if it has."""
    return "" if parts_of(context) else "its layers hold no MLP with an activation module, and no stacked experts"


def condition(context: Context) -> Verdict:
    """Needed if a batch has shown that a part or map comes near 65,504 and runs in float16; else offered."""
    now, planned = dtype_name(context.stream_dtype), context.compute_dtype
    dtype = now if planned is None else dtype_name(planned)
    if dtype != "float16":
        return NotNeeded(f"feed-forward parts compute in {dtype}, whose range holds their values")
    if context.peaks is None:
        measures = "hfpatch.apply(model, batch=batch) measures it"
        return Offered(f"whether a feed-forward part passes 65,504 depends on weights and text; {measures}", False)
    parts, ends = parts_of(context), ends_of(context)
    worst = context.peaks.at([*(place for part in parts for place in part.places), *(path for path, _ in ends)])
    if worst is None:
        return Offered("no feed-forward part of it ran on this batch", False)
    if math.isnan(worst.value):
        return Refused(f"what {worst.path} computes is NaN in float32 too; trace it: with hfpatch.trace(model)")
    if other := lost(context):
        return Refused(f"{other.path.rpartition('.')[2]}, which no patch serves, {other}")
    if not near_limit(worst):
        return Offered(f"the largest value of its feed-forward parts and attention outputs {worst}", False)
    near = [part for part in parts if near_limit(peak_at(context, part.places))]
    near_ends = [end for end in ends if near_limit(peak_at(context, end[:1]))]
    found = (*(why_impossible(context, part) for part in near), *map(why_end_impossible, near_ends))
    if why := next(filter(None, found), ""):
        return Refused(why)
    counts = {"feed-forward parts": (near, parts), "attention outputs": (near_ends, ends)}
    said = " and ".join(f"{len(few)} of {len(every)} {name}" for name, (few, every) in counts.items() if few)
    return Needed(f"{said} come near 65,504; the largest value {worst}")


def _by_way(way: str) -> Callable[[Context], Iterable[Target]]:
    def find(context: Context) -> Iterable[Target]:
        for part in chosen(context)[0]:
            if way_of(context, part) == way:
                yield from (Target(*place) for place in changed_by(part, way))

    return find


def _ends_by_way(way: str) -> Callable[[Context], Iterable[Target]]:
    return lambda context: (Target(*end) for end in chosen(context)[1] if way_of_end(end) == way)


def _code(context: Context) -> Iterable[Target]:
    """Find the parts, the modules that hold an attention's last map, and the modules between them and their layers."""
    modules = context.survey.modules
    layers = {path for stack in context.stacks for path, _ in stack.layers}
    holders = (path.removesuffix(".base_layer").rpartition(".")[0] for path, _ in ends_of(context))
    for inner in (*(part.path for part in parts_of(context)), *holders):
        path = inner
        while path and path not in layers:
            yield Target(path, modules[path])
            path = path.rpartition(".")[0]


def scale(context: Context, target: Target) -> tuple[str, str, int]:
    """Return the names of a part's activation and last map, and k, which gives its largest value room for 16 times."""
    part = next(part for part in parts_of(context) if part.path == target.path)
    k = exponent(peak_at(context, part.places), in_force(part).get("scaled"))
    return part.name_of_activation, part.name_of_last, k


def scale_of_end(context: Context, target: Target) -> int:
    """Return k for an attention's last map."""
    return exponent(peak_at(context, [target.path]), end_in_force((target.path, target.module)).get("scaled"))


PATCH = Patch(
    title="Feed-forward parts and attention outputs scaled by a power of two, or in float32",
    serves=Structure("layers with an MLP that holds an activation, or with stacked experts", why_not),
    condition=condition,
    edits=(
        edits.scale_branch(select.Selection("gated parts", _by_way("scaled"), may_be_empty=True), scale),
        edits.in_float32_inside(select.Selection("other parts", _by_way("inside"), may_be_empty=True)),
        edits.in_float32(select.Selection("maps of layers", _by_way("maps"), may_be_empty=True)),
        edits.scale_map(select.Selection("attention outputs", _ends_by_way("scaled"), may_be_empty=True), scale_of_end),
        edits.in_float32(select.Selection("attention outputs with a bias", _ends_by_way("maps"), may_be_empty=True)),
    ),
    effect="equivalent",
    tolerance=6e-3,
    depends_on=(select.layers(), select.layer_norms(), select.Selection("feed-forward parts", _code)),
    symptom=wrong_logits,
    repros=(Case(ANY, "float16", branches=True),),
    leaves_alone=(Case("llama", dtype="float16"), Case("llama", dtype="bfloat16")),
    but=dict.fromkeys(("t5", "mt5", "umt5", "longt5"), T5),
    needs=("fp16-residual-overflow",),
    suggests="stock alternative: bfloat16 weights",
    answers_where_it_edits=("overflow", "cast-overflow"),
)
