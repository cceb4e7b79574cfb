"""Scales a tiny model's weights until its residual stream overflows float16, and none of its branches does."""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hfpatch.compat import hooks
from hfpatch.errors import InputError
from hfpatch.inspecting.layers import layer_lists
from hfpatch.model.embed import find_embedding
from hfpatch.model.norms import acts_as_norm
from hfpatch.model.roles import Stack
from hfpatch.model.survey import Survey
from hfpatch.model.walk import Submodel, starred

STREAM = 68_000.0
"""Target value of the stream; the largest float16 is 65,504."""
BRANCH = 62_000.0
"""Limit of the branches, so that only the sum overflows."""
MAX = 65_504.0
LEAST = 66_000.0
"""Least value of a stream that overflows float16, with some room for rounding."""
SCALES = re.compile(r"lambda|layer_?scale|(^|\.)gamma|(^|\.)ls_?\d")
"""Names of the learned scales between a branch and the stream."""
WEIGHT = 40_000.0
"""Limit of the weights."""
STEP = 1.2
TRIES = 60


class NothingGrowsError(InputError):
    """The layers of a model normalise every sum, so their stream cannot overflow."""


def overflow(model: nn.Module, inputs: Mapping[str, Any], tower: str = "") -> float:
    """Scale the weights that write to the stream, in place, until the stream exceeds 65,504 on these inputs.

    The norms at the ends of the branches are scaled, or else the last matrix of each branch; once those reach the
    limit of float16, the matrices before them.

    Args:
        model: A tiny model; it is changed.
        inputs: Arguments for its forward.
        tower: Architecture of the submodel whose stream it is; by default the one that reads tokens.

    Returns:
        The largest absolute value in the stream; with several stacks, the smallest of theirs.

    Raises:
        NothingGrowsError: Each layer returns the output of a norm.
        InputError: The model has no stack of decoder layers, or its stream cannot be made to overflow alone.
    """
    found = _stacks(model, tower)
    if count := _normalised(model, inputs, tower):
        raise NothingGrowsError(
            f"each of the {count} layers of {type(model).__name__} returned the output of a norm, so no stream grows "
            "from layer to layer"
        )
    if not found:
        raise InputError(f"{type(model).__name__} has no list of decoder layers; want a model with a residual stream")
    _open_scales(found)
    last, before = _writers(model, found, inputs)
    stream, branch = _peaks(model, found, inputs)
    for _ in range(TRIES):
        if stream > STREAM:
            return stream
        if not branch < BRANCH / STEP:
            return _to_the_limit(model, found, inputs, last, stream, branch)
        grown = [p for p in last if _largest(p) < WEIGHT / STEP] or before
        largest = max(map(_largest, grown), default=math.inf)
        if largest > WEIGHT:
            break
        far = min(STREAM / stream, BRANCH / branch, WEIGHT / largest) / 2 if stream and branch and largest else 2.0
        with torch.no_grad():
            for parameter in grown:
                parameter.mul_(max(STEP, far))  # large steps while all values are small
        stream, branch = _peaks(model, found, inputs)
    raise _not_alone(model, stream, branch)


def _to_the_limit(
    model: nn.Module,
    stacks: tuple[Stack, ...],
    inputs: Mapping[str, Any],
    last: list[nn.Parameter],
    stream: float,
    branch: float,
) -> float:
    """Scale what is added to the stream until the largest branch is at its limit; return the size of the stream."""
    if last and branch < BRANCH:
        with torch.no_grad():
            for parameter in last:
                parameter.mul_(BRANCH / branch)
        stream, branch = _peaks(model, stacks, inputs)
    if stream > LEAST and branch < MAX:
        return stream
    raise _not_alone(model, stream, branch)


def _not_alone(model: nn.Module, stream: float, branch: float) -> InputError:
    return InputError(
        f"{type(model).__name__}: the stream reaches {stream:.3g} and a branch {branch:.3g}; scaling did not make "
        "the stream alone overflow"
    )


def _open_scales(stacks: tuple[Stack, ...]) -> None:
    """Set the learned scales of branches, which begin near 0 in some towers, to 1."""
    with torch.no_grad():
        for layer in {id(m): m for stack in stacks for _, m in stack.layers}.values():
            for name, parameter in layer.named_parameters():
                if parameter.dim() == 1 and SCALES.search(name) and not float(parameter.abs().max()) > 1:
                    parameter.fill_(1.0)


def _normalised(model: nn.Module, inputs: Mapping[str, Any], tower: str) -> int:
    """Return the number of layers if each of them returned the output of a norm in it, else 0."""
    survey = Survey(model)
    homes = {s.path for s in survey.submodels if s.architecture == tower}
    lists = {layers.path for layers in layer_lists(survey) if not tower or layers.submodel in homes}
    layers = [m for path, m in survey.modules.items() if starred(path.rpartition(".")[0]) in lists]
    norms = [n for layer in layers for n in layer.modules() if acts_as_norm(n)]
    normed: list[torch.Tensor] = []
    returned: dict[nn.Module, bool] = {}

    def look(module: nn.Module, out: Any) -> None:
        first = out[0] if isinstance(out, (tuple, list)) else out
        if not isinstance(first, torch.Tensor):
            return
        if module in every:
            returned[module] = returned.get(module, True) and _made_of(first, normed)
            normed.clear()
        else:
            normed.append(first)

    every = set(layers)
    with _hooked([*layers, *norms], look):
        _run(model, inputs)
    return len(returned) if all(returned.values()) else 0


def _made_of(tensor: torch.Tensor, others: list[torch.Tensor]) -> bool:
    """True if a tensor is one of the others, or each of its rows is a row of them: two of them joined."""
    if any(tensor is other for other in others):
        return True
    width = tensor.shape[-1]
    rows = [other.reshape(-1, width) for other in others if other.shape[-1] == width]
    if not rows:
        return False
    known = torch.cat(rows)
    return all(bool((known == row).all(-1).any()) for row in tensor.reshape(-1, width))


def _largest(parameter: nn.Parameter) -> float:
    return float(parameter.detach().abs().max())


def _stacks(model: nn.Module, tower: str) -> tuple[Stack, ...]:
    """Return the stacks of a tower, or those of the submodel that reads tokens.

    Of several that read tokens, those of the one with most layers, then of the last.
    """
    survey = Survey(model)
    if tower:
        return tuple(k for s in survey.submodels if s.architecture == tower for k in survey.stacks.get(s.path, ()))
    found = [(s, stacks) for s in reversed(survey.submodels) if (stacks := survey.stacks.get(s.path))]

    def size(each: tuple[Submodel, tuple[Stack, ...]]) -> tuple[bool, int]:
        return find_embedding(each[0].model) is not None, len(each[1][-1].layers)

    return max(found, key=size)[1] if found else ()


def _writers(
    model: nn.Module, stacks: tuple[Stack, ...], inputs: Mapping[str, Any]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters that write to the stream, and the matrices before them."""
    norms = [p for stack in stacks for _, norm in stack.branch_out_norms for p in norm.parameters()]
    if norms:
        with torch.no_grad():
            for parameter in norms:
                parameter.fill_(1.0)  # Gemma's weights start at 0
        return norms, []
    ran: list[nn.Module] = []
    width: dict[nn.Module, int] = {}
    branches = [branch for stack in stacks for _, branch in stack.branches]
    inside = [m for branch in branches for m in branch.modules() if _matrices(m) and not _holds_matrices(m)]
    first = stacks[-1].layers[0][1]

    def note(module: nn.Module, out: Any) -> None:
        ran.append(module)
        width[module] = (out if isinstance(out, torch.Tensor) else out[0]).shape[-1]

    with _hooked([first, *inside], note):
        _run(model, inputs)
    last: dict[int, nn.Parameter] = {}
    before: dict[int, nn.Parameter] = {}
    for branch in branches:
        own = set(branch.modules())
        order = [m for m in ran if m in own]
        for module in order:
            *others, final = _matrices(module)
            before |= {id(p): p for p in (*others, final)}
            if module is order[-1] and width[module] == width[first]:
                last[id(final)] = final
    choosing = {id(p) for b in branches for n, p in b.named_parameters() if only_sharpens(n)}
    return list(last.values()), [p for key, p in before.items() if key not in last and key not in choosing]


def only_sharpens(name: str) -> bool:
    """True for queries, keys, gates and routers: scaling them only sharpens a softmax or a sigmoid."""
    return any(word in name for word in ("q_", "k_", "query", "key", "qkv", "q.", "k.", "gate", "router"))


def _holds_matrices(module: nn.Module) -> bool:
    return any(_matrices(inner) for child in module.children() for inner in child.modules())


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters(recurse=False) if p.dim() > 1]


def _peaks(model: nn.Module, stacks: tuple[Stack, ...], inputs: Mapping[str, Any]) -> tuple[float, float]:
    """Return the largest absolute value of the stream (of several, the smallest such value), and of the branches."""
    home = {layer: stack.path for stack in stacks for _, layer in stack.layers}
    peaks: dict[str | None, float] = {stack.path: 0.0 for stack in stacks} | {None: 0.0}

    def look(module: nn.Module, out: Any) -> None:
        first = out[0] if isinstance(out, (tuple, list)) else out
        if isinstance(first, torch.Tensor) and first.numel():
            peaks[home.get(module)] = max(peaks[home.get(module)], float(first.abs().max()))

    def look_before(_module: nn.Module, args: tuple[Any, ...]) -> None:
        """Note what the last map of a gated MLP reads: a product that no module returns."""
        if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point() and args[0].numel():
            peaks[None] = max(peaks[None], float(args[0].abs().max()))

    # a module around others may already include the residual; what reads the raw stream is as large as it is
    branches = [branch for stack in stacks for _, branch in stack.branches]
    raw = {m for stack in stacks for _, part in stack.raw_readers for m in part.modules()}
    inside = [m for b in branches for m in b.modules() if m not in raw and (_matrices(m) or not list(m.children()))]
    norms = [norm for stack in stacks for _, norm in stack.branch_out_norms]
    reading = [hooks.before(m, look_before) for m in inside if isinstance(m, nn.Linear)]
    try:
        with _hooked([*home, *inside, *norms], look):
            _run(model, inputs)
    finally:
        for handle in reading:
            handle.remove()
    branch = peaks.pop(None)
    return min(peaks.values()), branch


@contextmanager
def _hooked(modules: Iterable[nn.Module], see: Any) -> Generator[None]:
    def hook(module: nn.Module, _args: Any, out: Any) -> None:
        see(module, out)

    handles = [hooks.after(m, hook) for m in set(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _run(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    with torch.no_grad():
        model(**inputs)
