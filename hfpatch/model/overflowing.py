"""Weights of a tiny model scaled until its residual stream passes what float16 holds, and no branch of it does."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hfpatch.errors import InputError
from hfpatch.model.roles import Stack, stack
from hfpatch.model.survey import Survey

STREAM = 68_000.0
"""What the stream is to reach; float16 ends at 65,504."""
BRANCH = 62_000.0
"""What no branch may reach, so that only the sum is at fault."""
WEIGHT = 40_000.0
"""The largest weight there may be."""
STEP = 1.2
TRIES = 60


def overflow(model: nn.Module, inputs: Mapping[str, Any]) -> float:
    """Scale what writes to the stream, in place, until the stream passes 65,504 on these inputs.

    A norm that ends a branch is scaled, else the last matrices that the branch applies; where those have become as
    large as float16 allows, the matrices before them.

    Returns:
        The largest value of the stream.

    Raises:
        InputError: The model has no stack of decoder layers, or its stream cannot be brought there.
    """
    found = _stack(model)
    if found is None:
        raise InputError(f"{type(model).__name__} has no list of decoder layers whose stream could overflow")
    last, before = _writers(model, found, inputs)
    stream, branch = _peaks(model, found, inputs)
    for _ in range(TRIES):
        if stream > STREAM:
            return stream
        if not branch < BRANCH / STEP:
            break
        grown = [p for p in last if float(p.abs().max()) < WEIGHT / STEP] or before
        largest = max((float(p.abs().max()) for p in grown), default=math.inf)
        if largest > WEIGHT:
            break
        far = min(STREAM / stream, BRANCH / branch, WEIGHT / largest) / 2 if stream and branch and largest else 2.0
        with torch.no_grad():
            for parameter in grown:
                parameter.mul_(max(STEP, far))  # large steps while all is small
        stream, branch = _peaks(model, found, inputs)
    raise InputError(
        f"{type(model).__name__}: the stream reaches {stream:.3g} and a branch {branch:.3g}, which is not an overflow "
        "of the stream alone"
    )


def _stack(model: nn.Module) -> Stack | None:
    survey = Survey(model)
    stacks = [s for each in survey.submodels if (s := stack(survey, each)) is not None]
    return max(stacks, key=lambda s: len(s.layers), default=None)


def _writers(
    model: nn.Module, found: Stack, inputs: Mapping[str, Any]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """What writes to the stream, and the matrices before it."""
    norms = [p for _, norm in found.branch_out_norms for p in norm.parameters()]
    if norms:
        with torch.no_grad():
            for parameter in norms:
                parameter.fill_(1.0)  # Gemma's weights start at 0
        return norms, []
    ran: list[nn.Module] = []
    inside = [m for _, branch in found.branches for m in branch.modules() if _matrices(m)]

    def note(module: nn.Module, _out: Any) -> None:
        ran.append(module)

    with _hooked(inside, note):
        _run(model, inputs)
    last: dict[int, nn.Parameter] = {}
    before: dict[int, nn.Parameter] = {}
    for _, branch in found.branches:
        own = set(branch.modules())
        order = [m for m in ran if m in own]
        for module in order:
            *first, final = _matrices(module)
            before |= {id(p): p for p in (*first, final)}
            if module is order[-1]:
                last[id(final)] = final
    choosing = {id(p) for _, b in found.branches for n, p in b.named_parameters() if _chooses(n)}
    return list(last.values()), [p for key, p in before.items() if key not in last and key not in choosing]


def _chooses(name: str) -> bool:
    """Queries, keys, gates and routers: larger ones would only sharpen a softmax or a sigmoid."""
    return any(word in name for word in ("q_", "k_", "query", "key", "qkv", "q.", "k.", "gate", "router"))


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters(recurse=False) if p.dim() > 1]


def _peaks(model: nn.Module, found: Stack, inputs: Mapping[str, Any]) -> tuple[float, float]:
    layers = {layer for _, layer in found.layers}
    peaks = {True: 0.0, False: 0.0}

    def look(module: nn.Module, out: Any) -> None:
        first = out[0] if isinstance(out, (tuple, list)) else out
        if isinstance(first, torch.Tensor):
            peaks[module in layers] = max(peaks[module in layers], float(first.abs().max()))

    inside = [m for _, branch in found.branches for m in branch.modules()]
    norms = [norm for _, norm in found.branch_out_norms]
    with _hooked([*layers, *inside, *norms], look):
        _run(model, inputs)
    return peaks[True], peaks[False]


@contextmanager
def _hooked(modules: Iterable[nn.Module], see: Any) -> Generator[None]:
    handles = [m.register_forward_hook(lambda module, _args, out: see(module, out)) for m in set(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _run(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    with torch.no_grad():
        model(**inputs)
