"""Computes branches that float16 cannot hold with values a power of two smaller, or in float32.

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
from hfpatch.patching.context import Context, Target
from hfpatch.patching.language import ANY, Case, Needed, NotNeeded, Offered, Patch, Refused, Structure, Verdict
from hfpatch.patching.verifying.wrong_logits import wrong_logits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch import nn

    from hfpatch.inspecting.feed_forward import FeedForward
    from hfpatch.inspecting.peaks import Peak
    from hfpatch.model.roles import Place
    from hfpatch.patching.kinds.base import Change

EXPONENT = 3
"""k if no need was measured: values up to half a million."""
ROOM, WANTED = 2.0, 16.0
"""Room below which a part or map is changed, and the room that it then gets."""
T5 = NotNeeded("wo-overflow is for this architecture: it computes wo in float32")


def why_not(context: Context) -> str:
    """Why a submodel has no feed-forward parts that can be changed; empty if it has."""
    return "" if _parts(context) else "its layers hold no MLP with an activation module, and no stacked experts"


def condition(context: Context) -> Verdict:
    """Needed if a batch has shown that a part or map comes near 65,504 and runs in float16; else offered."""
    now, planned = dtype_name(context.stream_dtype), context.compute_dtype
    dtype = now if planned is None else dtype_name(planned)
    if dtype != "float16":
        return NotNeeded(f"feed-forward parts compute in {dtype}, whose range holds their values")
    if context.peaks is None:
        measures = "hfpatch.apply(model, batch=batch) measures it"
        return Offered(f"whether a feed-forward part passes 65,504 depends on weights and text; {measures}", False)
    parts, ends = _parts(context), _ends(context)
    worst = context.peaks.at([*(place for part in parts for place in part.places), *(path for path, _ in ends)])
    if worst is None:
        return Offered("no feed-forward part of it ran on this batch", False)
    if math.isnan(worst.value):
        return Refused(f"what {worst.path} computes is NaN in float32 too; trace it: with hfpatch.trace(model)")
    if other := _lost(context):
        return Refused(f"{other.path.rpartition('.')[2]}, which no patch serves, {other}")
    if not _near(worst):
        return Offered(f"the largest value of its feed-forward parts and attention outputs {worst}", False)
    near = [part for part in parts if _near(_peak(context, part.places))]
    near_ends = [end for end in ends if _near(_peak(context, end[:1]))]
    found = (*(_impossible(context, part) for part in near), *map(_impossible_end, near_ends))
    if why := next(filter(None, found), ""):
        return Refused(why)
    counts = {"feed-forward parts": (near, parts), "attention outputs": (near_ends, ends)}
    said = " and ".join(f"{len(few)} of {len(every)} {name}" for name, (few, every) in counts.items() if few)
    return Needed(f"{said} come near 65,504; the largest value {worst}")


def _parts(context: Context) -> tuple[FeedForward, ...]:
    from hfpatch.inspecting.feed_forward import feed_forwards

    home = context.submodel.path if context.submodel else ""
    return context.survey.once(
        ("feed-forward parts", home), lambda: tuple(part for stack in context.stacks for part in feed_forwards(stack))
    )


def _ends(context: Context) -> tuple[Place, ...]:
    from hfpatch.inspecting.branch_ends import branch_ends

    home, modules = context.submodel.path if context.submodel else "", context.survey.modules
    return context.survey.once(
        ("ends of attentions", home),
        lambda: tuple(end for stack in context.stacks for end in branch_ends(stack, modules)),
    )


def _lost(context: Context) -> Peak | None:
    """Return the largest value of an attention's other maps that compute in float16, if it passes float16's maximum."""
    from hfpatch.inspecting.branch_ends import branch_maps

    ends = {path for path, _ in _ends(context)}
    maps = (place for stack in context.stacks for found in branch_maps(stack) for place in found)
    peak = _peak(context, [path for path, module in maps if path not in ends and not _kept_wide(context, module)])
    return peak if peak is not None and peak.room < 1 else None


def _kept_wide(context: Context, module: nn.Module) -> bool:
    """True if a map's weight has a floating dtype other than that of the stream: the loader keeps some in float32."""
    dtype: torch.dtype | None = getattr(getattr(module, "weight", None), "dtype", None)
    return dtype is not None and dtype.is_floating_point and dtype != context.stream_dtype


def _peak(context: Context, places: Iterable[str]) -> Peak | None:
    return None if context.peaks is None else context.peaks.at(places)


def _near(peak: Peak | None) -> bool:
    return peak is not None and peak.room < ROOM


def _chosen(context: Context) -> tuple[tuple[FeedForward, ...], tuple[Place, ...]]:
    """Return the parts and ends to change: those near float16's maximum and those changed before; if none is, all."""
    parts = tuple(p for p in _parts(context) if _near(_peak(context, p.places)) or _in_force(p))
    ends = tuple(e for e in _ends(context) if _near(_peak(context, e[:1])) or _end_in_force(e))
    if parts or ends:
        return parts, ends
    return (
        tuple(p for p in _parts(context) if not _impossible(context, p)),
        tuple(e for e in _ends(context) if not _impossible_end(e)),
    )


def _in_force(part: FeedForward) -> dict[str, Change]:
    """Return the change of a part that is recorded, by its way; empty if there is none."""
    from hfpatch.patching.kinds.compute_in_float32 import ComputeInFloat32
    from hfpatch.patching.kinds.compute_inside import ComputeInside
    from hfpatch.patching.kinds.scale_branch import ScaleBranch
    from hfpatch.patching.record import record_at

    kinds = {"scaled": ScaleBranch, "inside": ComputeInside, "maps": ComputeInFloat32}
    found = (
        (way, record_at(_changed(part, way)[0][1], kind)) for way, kind in kinds.items() if part.maps or way != "maps"
    )
    return {way: record.change for way, record in found if record is not None}


def _end_in_force(end: Place) -> dict[str, Change]:
    """Return the change of an attention's last map that is recorded, by its way; empty if there is none."""
    from hfpatch.patching.kinds.compute_in_float32 import ComputeInFloat32
    from hfpatch.patching.kinds.in_float32.scale_map import ScaleMap
    from hfpatch.patching.record import record_at

    found = ((way, record_at(end[1], kind)) for way, kind in {"scaled": ScaleMap, "maps": ComputeInFloat32}.items())
    return {way: record.change for way, record in found if record is not None}


def _changed(part: FeedForward, way: str) -> tuple[Place, ...]:
    """Return the modules that a way of changing a part edits."""
    return {"scaled": ((part.path, part.module),), "inside": (part.around,), "maps": part.maps}[way]


def _way(context: Context, part: FeedForward) -> str:
    """Return how a part is changed: `scaled`, `inside` or, of a layer, its `maps` in float32. One in force stays."""
    if there := _in_force(part):
        return next(iter(there))
    if part.of_layer:
        return "maps"
    return "inside" if part.why_not_scaled or _near(_peak(context, part.early)) else "scaled"


def _way_of_end(end: Place) -> str:
    """Return how an attention's last map is changed: `scaled`, or `maps` in float32. One in force stays."""
    if there := _end_in_force(end):
        return next(iter(there))
    return "scaled" if getattr(end[1], "bias", None) is None else "maps"


def _impossible(context: Context, part: FeedForward) -> str:
    """Return why a part can neither be scaled nor computed in float32; empty if it can."""
    way, early = _way(context, part), _peak(context, part.early)
    if way == "scaled" and early is not None and _near(early):
        again = "hfpatch.revert(model, only='fp16-branch-overflow') first, then it is computed in float32"
        return f"{part.path} is scaled already, which does not help {early.path}: call {again}"
    if way != "scaled" and (packed := _packed(part.module)):
        why = part.why_not_scaled or f"{early}, before what would be scaled"
        return f"{part.path}.{packed} is quantised and cannot be computed in float32; it is not scaled: {why}"
    return ""


def _impossible_end(end: Place) -> str:
    """Return why an attention's last map can neither be scaled nor computed in float32; empty if it can."""
    path, module = end
    if _way_of_end(end) == "maps" and (packed := _packed(module)):
        return f"{path}.{packed} is quantised and cannot be computed in float32; it is not scaled: it adds a bias"
    return ""


def _packed(module: nn.Module) -> str:
    """Return the name of the first parameter that is quantised; empty if none is."""
    return next((name for name, p in module.named_parameters() if not p.dtype.is_floating_point), "")


def _by_way(way: str) -> Callable[[Context], Iterable[Target]]:
    def find(context: Context) -> Iterable[Target]:
        for part in _chosen(context)[0]:
            if _way(context, part) == way:
                yield from (Target(*place) for place in _changed(part, way))

    return find


def _ends_by_way(way: str) -> Callable[[Context], Iterable[Target]]:
    return lambda context: (Target(*end) for end in _chosen(context)[1] if _way_of_end(end) == way)


def _code(context: Context) -> Iterable[Target]:
    """Find the parts, the modules that hold an attention's last map, and the modules between them and their layers."""
    modules = context.survey.modules
    layers = {path for stack in context.stacks for path, _ in stack.layers}
    holders = (path.removesuffix(".base_layer").rpartition(".")[0] for path, _ in _ends(context))
    for inner in (*(part.path for part in _parts(context)), *holders):
        path = inner
        while path and path not in layers:
            yield Target(path, modules[path])
            path = path.rpartition(".")[0]


def scale(context: Context, target: Target) -> tuple[str, str, int]:
    """Return the names of a part's activation and last map, and k, which gives its largest value room for 16 times."""
    part = next(part for part in _parts(context) if part.path == target.path)
    k = _exponent(_peak(context, part.places), _in_force(part).get("scaled"))
    return part.name_of_activation, part.name_of_last, k


def scale_of_end(context: Context, target: Target) -> int:
    """Return k for an attention's last map."""
    return _exponent(_peak(context, [target.path]), _end_in_force((target.path, target.module)).get("scaled"))


def _exponent(peak: Peak | None, change: Change | None) -> int:
    now: int = getattr(change, "exponent", 0)
    least = math.ceil(math.log2(WANTED / peak.room)) if peak is not None and _near(peak) else EXPONENT
    enough = now and (peak is None or peak.room * 2**now >= ROOM)
    return now if enough else least


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
