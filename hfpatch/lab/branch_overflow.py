"""Scales the feed-forward parts of a tiny model until values in them pass float16's maximum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hfpatch.errors import InputError
from hfpatch.inspecting.feed_forward import FeedForward, feed_forwards
from hfpatch.inspecting.peaks import LIMIT, Peaks, peaks_of
from hfpatch.model.embed import find_embedding
from hfpatch.model.survey import Survey

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
    """Scale weights of two layers, in place, until values in their feed-forward parts exceed 65,504 on these inputs.

    In the first of the layers the product of a gated part, or what the first map of a plain one writes, passes it; in
    the second what the last map writes. Weights stay in float16's normal range.

    Args:
        model: A tiny model; it is changed.
        inputs: Arguments for its forward.

    Returns:
        The paths of the parts.

    Raises:
        NoBranchError: The model has no layers with such parts, or one cannot be made to overflow.
    """
    survey = Survey(model)
    reads = [s.path for s in survey.submodels if find_embedding(s.model) is not None]
    found = [part for path in reads for stack in survey.stacks.get(path, ())[-1:] for part in feed_forwards(stack)]
    parts = [part for part in found if _reached(model, inputs, part, inner=True)]
    if not parts:
        raise NoBranchError(f"{type(model).__name__} has no layers with a feed-forward part")
    first = parts[min(1, len(parts) - 1)]
    last = next((part for part in reversed(parts) if part is not first), first)
    _grow(model, inputs, first, inner=True)
    if last is not first:
        _grow(model, inputs, last, inner=False)
    return list(dict.fromkeys([first.path, last.path]))


def _grow(model: nn.Module, inputs: Mapping[str, Any], part: FeedForward, *, inner: bool) -> None:
    before, last = _weights(part)
    _set_bias(part)
    _scale_until(model, inputs, part, before, TARGET if inner else HEALTHY, inner=True)
    if not inner:
        _scale_until(model, inputs, part, last, TARGET, inner=False)


def _set_bias(part: FeedForward) -> None:
    bias: Any = getattr(part.maps[-1][1], "bias", None) if part.maps else None
    if bias is not None:
        with torch.no_grad():
            bias.copy_(torch.linspace(-BIAS, BIAS, bias.numel()).view_as(bias))


def _scale_until(
    model: nn.Module,
    inputs: Mapping[str, Any],
    part: FeedForward,
    weights: list[nn.Parameter],
    target: float,
    *,
    inner: bool,
) -> None:
    for _ in range(STEPS):
        reached = _reached(model, inputs, part, inner=inner)
        if reached > target / 1.4:
            return
        largest = max(float(w.detach().abs().max()) for w in weights)
        if largest > WEIGHT / 1.01 or not reached:
            break
        grows = 2 if inner else 1  # a gate and a squared activation grow with the square of the weights
        factor = min((target / reached) ** (1 / grows), WEIGHT / largest)
        with torch.no_grad():
            for weight in weights:
                weight.mul_(factor)
    raise NoBranchError(
        f"{type(model).__name__}: {part.path} reaches {_reached(model, inputs, part, inner=inner):.3g}; scaling its "
        "weights did not make it overflow"
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


def _reached(model: nn.Module, inputs: Mapping[str, Any], part: FeedForward, *, inner: bool) -> float:
    with torch.no_grad(), peaks_of(model) as found:
        model(**inputs)
    peaks = Peaks({path: float(value) for path, value in found.items()})
    own = part.path if part.gated or part.activation is None else part.activation[0]
    places = [own] if inner or not part.maps else [part.maps[-1][0]]
    peak = peaks.at(places)
    return 0.0 if peak is None else peak.value
