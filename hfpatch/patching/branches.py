"""What a patch for branches that float16 cannot hold does about each of them: which, how, and why not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hfpatch.patching.context import Context

if TYPE_CHECKING:
    from collections.abc import Iterable

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


def parts_of(context: Context) -> tuple[FeedForward, ...]:
    """Return the feed-forward parts of a submodel."""
    from hfpatch.inspecting.feed_forward import feed_forwards

    home = context.submodel.path if context.submodel else ""
    return context.survey.once(
        ("feed-forward parts", home), lambda: tuple(part for stack in context.stacks for part in feed_forwards(stack))
    )


def ends_of(context: Context) -> tuple[Place, ...]:
    """Return the last maps of its attentions."""
    from hfpatch.inspecting.branch_ends import branch_ends

    home, modules = context.submodel.path if context.submodel else "", context.survey.modules
    return context.survey.once(
        ("ends of attentions", home),
        lambda: tuple(end for stack in context.stacks for end in branch_ends(stack, modules)),
    )


def lost(context: Context) -> Peak | None:
    """Return the largest value of an attention's other maps that compute in float16, if it passes float16's maximum."""
    from hfpatch.inspecting.branch_ends import branch_maps

    ends = {path for path, _ in ends_of(context)}
    maps = (place for stack in context.stacks for found in branch_maps(stack) for place in found)
    peak = peak_at(context, [path for path, module in maps if path not in ends and not _kept_wide(context, module)])
    return peak if peak is not None and peak.room < 1 else None


def _kept_wide(context: Context, module: nn.Module) -> bool:
    """True if a map's weight has a floating dtype other than that of the stream: the loader keeps some in float32."""
    dtype: torch.dtype | None = getattr(getattr(module, "weight", None), "dtype", None)
    return dtype is not None and dtype.is_floating_point and dtype != context.stream_dtype


def peak_at(context: Context, places: Iterable[str]) -> Peak | None:
    """Return the largest value at these modules on the batch; None without one."""
    return None if context.peaks is None else context.peaks.at(places)


def near_limit(peak: Peak | None) -> bool:
    """True if a value comes near float16's maximum."""
    return peak is not None and peak.room < ROOM


def chosen(context: Context) -> tuple[tuple[FeedForward, ...], tuple[Place, ...]]:
    """Return the parts and ends to change: those near float16's maximum and those changed before; if none is, all."""
    parts = tuple(p for p in parts_of(context) if near_limit(peak_at(context, p.places)) or in_force(p))
    ends = tuple(e for e in ends_of(context) if near_limit(peak_at(context, e[:1])) or end_in_force(e))
    if parts or ends:
        return parts, ends
    return (
        tuple(p for p in parts_of(context) if not why_impossible(context, p)),
        tuple(e for e in ends_of(context) if not why_end_impossible(e)),
    )


def in_force(part: FeedForward) -> dict[str, Change]:
    """Return the change of a part that is recorded, by its way; empty if there is none."""
    from hfpatch.patching.kinds.compute_in_float32 import ComputeInFloat32
    from hfpatch.patching.kinds.compute_inside import ComputeInside
    from hfpatch.patching.kinds.scale_branch import ScaleBranch
    from hfpatch.patching.record import record_at

    kinds = {"scaled": ScaleBranch, "inside": ComputeInside, "maps": ComputeInFloat32}
    found = (
        (way, record_at(changed_by(part, way)[0][1], kind)) for way, kind in kinds.items() if part.maps or way != "maps"
    )
    return {way: record.change for way, record in found if record is not None}


def end_in_force(end: Place) -> dict[str, Change]:
    """Return the change of an attention's last map that is recorded, by its way; empty if there is none."""
    from hfpatch.patching.kinds.compute_in_float32 import ComputeInFloat32
    from hfpatch.patching.kinds.in_float32.scale_map import ScaleMap
    from hfpatch.patching.record import record_at

    found = ((way, record_at(end[1], kind)) for way, kind in {"scaled": ScaleMap, "maps": ComputeInFloat32}.items())
    return {way: record.change for way, record in found if record is not None}


def changed_by(part: FeedForward, way: str) -> tuple[Place, ...]:
    """Return the modules that a way of changing a part edits."""
    return {"scaled": ((part.path, part.module),), "inside": (part.around,), "maps": part.maps}[way]


def way_of(context: Context, part: FeedForward) -> str:
    """Return how a part is changed: `scaled`, `inside` or, of a layer, its `maps` in float32. One in force stays."""
    if there := in_force(part):
        return next(iter(there))
    if part.of_layer:
        return "maps"
    return "inside" if part.why_not_scaled or near_limit(peak_at(context, part.early)) else "scaled"


def way_of_end(end: Place) -> str:
    """Return how an attention's last map is changed: `scaled`, or `maps` in float32. One in force stays."""
    if there := end_in_force(end):
        return next(iter(there))
    return "scaled" if getattr(end[1], "bias", None) is None else "maps"


def why_impossible(context: Context, part: FeedForward) -> str:
    """Return why a part can neither be scaled nor computed in float32; empty if it can."""
    way, early = way_of(context, part), peak_at(context, part.early)
    if way == "scaled" and early is not None and near_limit(early):
        again = "hfpatch.revert(model, only='fp16-branch-overflow') first, then it is computed in float32"
        return f"{part.path} is scaled already, which does not help {early.path}: call {again}"
    if way != "scaled" and (packed := _packed(part.module)):
        why = part.why_not_scaled or f"{early}, before what would be scaled"
        return f"{part.path}.{packed} is quantised and cannot be computed in float32; it is not scaled: {why}"
    return ""


def why_end_impossible(end: Place) -> str:
    """Return why an attention's last map can neither be scaled nor computed in float32; empty if it can."""
    path, module = end
    if way_of_end(end) == "maps" and (packed := _packed(module)):
        return f"{path}.{packed} is quantised and cannot be computed in float32; it is not scaled: it adds a bias"
    return ""


def _packed(module: nn.Module) -> str:
    """Return the name of the first parameter that is quantised; empty if none is."""
    return next((name for name, p in module.named_parameters() if not p.dtype.is_floating_point), "")


def exponent(peak: Peak | None, change: Change | None) -> int:
    """Return k, which gives the largest value room for 16 times; that of the change in force if it is enough."""
    now: int = getattr(change, "exponent", 0)
    least = math.ceil(math.log2(WANTED / peak.room)) if peak is not None and near_limit(peak) else EXPONENT
    enough = now and (peak is None or peak.room * 2**now >= ROOM)
    return now if enough else least
