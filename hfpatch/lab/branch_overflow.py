"""Scales branches of a tiny model, MLPs and an attention's last map, until values in them pass float16's maximum."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hfpatch.errors import InputError
from hfpatch.inspecting.branch_ends import branch_ends, branch_maps
from hfpatch.inspecting.feed_forward import FeedForward, feed_forwards
from hfpatch.inspecting.peaks import LIMIT, Peaks, peaks_of
from hfpatch.lab.overflow import only_sharpens
from hfpatch.model.embed import find_embedding
from hfpatch.model.roles import Place, Stack
from hfpatch.model.survey import Survey
from hfpatch.model.walk import inside

TARGET = 2.2 * LIMIT
"""Value that the branches are brought to."""
HEALTHY = 300.0
"""Value that the last map of a branch is to read, if its own output is what overflows."""
WEIGHT = 30_000.0
"""Limit of the weights, which float16 has to hold."""
BIAS = 300.0
"""Size of the biases of the last maps, so that one that is lost or scaled wrongly shows in the logits."""
STEPS = 16


class NoBranchError(InputError):
    """A model has no feed-forward part that can be made to overflow."""


def branch_overflow(model: nn.Module, inputs: Mapping[str, Any]) -> list[str]:
    """Scale weights of three layers, in place, until values in their branches exceed 65,504 on these inputs.

    In the first of the layers the product of a gated feed-forward part, or what the first map of a plain one writes,
    passes it; in the last what the last map of such a part writes; between them what the last map of an attention
    writes, if that can be brought there. Weights stay in float16's normal range.

    Args:
        model: A tiny model; it is changed.
        inputs: Arguments for its forward.

    Returns:
        The paths of the parts and of the attention's map.

    Raises:
        NoBranchError: The model has no layers with feed-forward parts, or one cannot be made to overflow.
    """
    survey = Survey(model)
    reads = [s.path for s in survey.submodels if find_embedding(s.model) is not None]
    stacks = [stack for path in reads for stack in survey.stacks.get(path, ())[-1:]]
    found = [part for stack in stacks for part in feed_forwards(stack)]
    parts = [part for part in found if _reached(model, inputs, _own(part))]
    if not parts:
        raise NoBranchError(f"{type(model).__name__} has no layers with a feed-forward part")
    first = parts[min(1, len(parts) - 1)]
    last = next((part for part in reversed(parts) if part is not first), first)
    _grow(model, inputs, first, inner=True)
    grown = [first.path, *_grow_end(model, inputs, survey, stacks)]
    if last is not first:
        _grow(model, inputs, last, inner=False)
    return list(dict.fromkeys([*grown, last.path]))


def _grow(model: nn.Module, inputs: Mapping[str, Any], part: FeedForward, *, inner: bool) -> None:
    before, last = _weights(part)
    if part.maps:
        _set_bias(part.maps[-1][1])
    # a gate and a squared activation grow with the square of the weights
    _scale_until(model, inputs, _own(part), before, TARGET if inner else HEALTHY, grows=2)
    if not inner:
        _scale_until(model, inputs, part.maps[-1][0] if part.maps else _own(part), last, TARGET)


def _grow_end(model: nn.Module, inputs: Mapping[str, Any], survey: Survey, stacks: list[Stack]) -> list[str]:
    """Make what the last map of an attention writes overflow, and nothing else in it; return its path.

    Of several classes of attentions, one that allows it; if none does, the weights stay and nothing is returned.
    """
    ends = [end for stack in stacks for end in branch_ends(stack, survey.modules) if _reached(model, inputs, end[0])]
    middle = sorted(ends, key=lambda end: abs(ends.index(end) - len(ends) // 2))
    of_class = {type(survey.modules[path.rpartition(".")[0]]): (path, end) for path, end in reversed(middle)}
    for path, end in sorted(of_class.values(), key=middle.index):
        maps = next(m for stack in stacks for m in branch_maps(stack) if any(module is end for _, module in m))
        before = [_matrix(m) for p, m in maps if m is not end and (_is_fused(p) or not only_sharpens(p))]
        changed = [*end.parameters(), *before]
        kept = [weight.detach().clone() for weight in changed]
        _set_bias(end)
        for weights in ([_matrix(end)], before):
            with contextlib.suppress(NoBranchError):
                _scale_until(model, inputs, path, weights, TARGET)
                if _alone(model, inputs, path, maps):
                    return [path]
        with torch.no_grad():
            for weight, values in zip(changed, kept, strict=True):
                weight.copy_(values)
    return []


def _alone(model: nn.Module, inputs: Mapping[str, Any], path: str, maps: tuple[Place, ...]) -> bool:
    """True if only the last map of an attention passes float16's maximum in it, and by no more than is wanted.

    A module around the map may add the residual to what it writes.
    """
    holders = {p.rpartition(".")[0] for p, _ in maps}
    values = _peaks(model, inputs).values
    sums = {p: 1.1 * values[path] for p in values if inside(path, p)}
    others = ((p, v) for p, v in values.items() if p != path and any(inside(p, holder) for holder in holders))
    return values[path] < 2 * TARGET and all(v < sums.get(p, LIMIT) for p, v in others)


def _is_fused(path: str) -> bool:
    return any(word in path for word in ("qkv", "query_key_value"))


def _set_bias(last: nn.Module) -> None:
    bias: Any = getattr(last, "bias", None)
    if bias is not None:
        with torch.no_grad():
            bias.copy_(torch.linspace(-BIAS, BIAS, bias.numel(), device="cpu", dtype=torch.float32).view_as(bias))


def _scale_until(
    model: nn.Module, inputs: Mapping[str, Any], path: str, weights: list[nn.Parameter], target: float, grows: int = 1
) -> None:
    """Scale weights until the operations of a module reach a value that grows with this power of them."""
    for _ in range(STEPS):
        reached = _reached(model, inputs, path)
        if reached > target / 1.4:
            return
        largest = max((float(w.detach().abs().max()) for w in weights), default=WEIGHT)
        if largest > WEIGHT / 1.01 or not reached:
            break
        factor = min((target / reached) ** (1 / grows), WEIGHT / largest)
        with torch.no_grad():
            for weight in weights:
                weight.mul_(factor)
    raise NoBranchError(
        f"{type(model).__name__}: {path} reaches {_reached(model, inputs, path):.3g}; scaling its weights did not make "
        "it overflow"
    )


def _weights(part: FeedForward) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices before a part's activation, and the last ones."""
    if part.maps:
        *first, (_, final) = part.maps
        return [_matrix(m) for _, m in first], [_matrix(final)]
    stacked = [p for p in part.module.parameters(recurse=False) if p.dim() == 3]
    return stacked[:-1], stacked[-1:]


def _matrix(module: nn.Module) -> nn.Parameter:
    return next(p for p in module.parameters(recurse=False) if p.dim() == 2)


def _own(part: FeedForward) -> str:
    """Return the path of the operations in which a part's product is seen, or what its activation gives."""
    return part.path if part.gated or part.activation is None else part.activation[0]


def _reached(model: nn.Module, inputs: Mapping[str, Any], path: str) -> float:
    peak = _peaks(model, inputs).at([path])
    return 0.0 if peak is None else peak.value


def _peaks(model: nn.Module, inputs: Mapping[str, Any]) -> Peaks:
    with torch.no_grad(), peaks_of(model) as found:
        model(**inputs)
    return Peaks({path: float(value) for path, value in found.items()})
