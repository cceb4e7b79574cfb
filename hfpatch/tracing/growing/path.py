"""The way of the signal through a call that was run again, and the operation on it that grows or shrinks it most."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from hfpatch.tracing.growing.flow import Direction, factor
from hfpatch.tracing.growing.followed import FUSED_NORMS, GIVEN, Edge, Followed, Ran, Size

FAINT, LEAST = 0.01, 2e-5
"""A norm does its work if its rows spread by at least this times the root of its eps, and by this."""

SELECTIONS = {
    "masked_scatter", "index_put", "scatter", "where", "masked_fill", "cat", "stack", "getitem", "index_select",
    "gather", "embedding", "split", "chunk", "unbind", "narrow", "select", "pad", "index_copy", "slice_scatter",
}  # fmt: skip
"""Operations that only choose or join values: the RMS of a part may differ from that of the whole."""
ROOTS = ("sqrt", "rsqrt", "pow", "div", "mul", "truediv")
"""Operations after which a value is no square any more."""


@dataclass(frozen=True)
class Step:
    """One operation on the way, or a norm that is made of several.

    Attributes:
        ran: The operation, an index of `Followed.ran`.
        node: Name of the backward function; empty forward.
        gain: What comes out of it, divided by what goes in.
        by_design: True for a norm that does its work.
    """

    ran: int
    node: str
    gain: float
    by_design: bool


@dataclass(frozen=True)
class Way:
    """The way of the signal.

    Attributes:
        steps: Its operations.
        before, after: The size at its start and at its end.
        whole: The factor between the two.
        net: The same without norms that do their work.
    """

    steps: tuple[Step, ...]
    before: Size
    after: Size
    whole: float
    net: float


def forward(seen: Followed) -> Way | None:
    """Return the way from an argument of a call to its output; None if the output's size comes from elsewhere."""
    edges: list[tuple[int, str, Size, Size]] = []
    at = seen.output
    while at is not None and at != GIVEN:
        ran = seen.ran[at]
        signal = [(o, s) for o, s in zip(ran.operands, ran.sources, strict=True) if s is not None]
        if not signal or _from_parameters(ran):
            return None
        top = max(o.count for o, _ in signal)
        alike = [(o, s) for o, s in signal if o.count == top]
        if ran.name == "mul" and ran.result.rms:  # of x and 1 + tanh(x) it is x, whose size is nearer to the result's
            alike.sort(key=lambda pair: -abs(math.log((pair[0].rms or 1e-300) / ran.result.rms)))
        else:
            alike.sort(key=lambda pair: pair[0].rms)
        operand, source = alike[-1]
        edges.append((at, "", operand, ran.result))
        at = source
    return _way(seen, edges[::-1], "forward") if edges and at == GIVEN else None


def _from_parameters(ran: Ran) -> bool:
    """True if the size of a result comes from a parameter that was added: a bias, or the embeddings of positions."""
    if ran.name in ("add", "radd", "iadd", "sub"):
        added = [o for o, s in zip(ran.operands, ran.sources, strict=True) if s is None]
    else:
        bias = {"linear": 2, "conv1d": 2, "conv2d": 2, "conv3d": 2, "addmm": 0, "baddbmm": 0}.get(ran.name)
        added = [ran.operands[bias]] if bias is not None and len(ran.operands) == 3 else []
    return any(o.rms > ran.result.rms / 2 for o in added)


def backward(seen: Followed, start: Edge | None, own: str | None = None) -> Way | None:
    """Return the way of the gradient from the outputs of a call to where it ends.

    Args:
        seen: The call.
        start: The gradient where it ends.
        own: Follow it only through operations of this module's own code; None for all.
    """
    if start is None:
        return None
    takers: dict[Any, list[Edge]] = {}
    for edge in seen.edges:
        takers.setdefault(edge.later[1], []).append(edge)
    depth = _depths(seen, takers)
    found: list[Edge] = []
    at = start.later[1]
    passed: set[Any] = set()
    while (edges := takers.get(at)) and at not in passed:
        passed.add(at)
        most = max(e.made.rms for e in edges)
        main = min((e for e in edges if e.made.rms >= most / 8), key=lambda e: depth.get(e.later[0], 0))
        if own is not None and seen.ran[main.ran].path != own:
            break
        found.append(main)
        at = main.later[0]
    return _way(seen, [(e.ran, e.node, e.given, e.made) for e in reversed(found)], "backward")


def into_arguments(seen: Followed) -> Edge | None:
    """Return the largest gradient that reaches an argument of the call."""
    return max((e for e in seen.edges if e.later[1] in seen.given), key=lambda e: e.made.rms, default=None)


def largest_within(seen: Followed, path: str | None) -> Edge | None:
    """Return the largest gradient inside a call, except of parameters, of sums, of squares, and within norms.

    Args:
        seen: The call.
        path: Only that of operations of this module's own code; None for all.
    """
    squares = _on_squares(seen)
    inner = [
        e
        for e in seen.edges
        if e.ran not in squares
        and (path is None or seen.ran[e.ran].path == path)
        and seen.ran[e.ran].path not in seen.norms
        and e.made.count >= e.given.count
        and (e.later[1].next_functions or e.later[1] in seen.given)
    ]
    return max(inner, key=lambda e: e.made.rms, default=None)


def smallest_within(seen: Followed, path: str) -> Edge | None:
    """Return the smallest gradient that a module's own code hands to other modules, where nothing else adds to it.

    Args:
        seen: The call of the module.
        path: Its path.
    """
    takers: dict[Any, float] = {}
    own = {e.later[0] for e in seen.edges if seen.ran[e.ran].path == path}
    for edge in seen.edges:
        takers[edge.later[1]] = max(takers.get(edge.later[1], 0.0), edge.made.rms)
    inner = [
        e
        for e in seen.edges
        if e.later[0] in own
        and e.later[1] not in own
        and e.made.count >= e.given.count
        and 0 < e.made.rms >= takers[e.later[1]] / 8
        and (e.later[1].next_functions or e.later[1] in seen.given)
    ]
    return min(inner, key=lambda e: e.made.rms, default=None)


def _on_squares(seen: Followed) -> set[int]:
    """Return the operations between a square and its root: their gradients have another unit."""
    squares: set[int] = set()
    found: set[int] = set()
    for index, ran in enumerate(seen.ran):
        twice = ran.name == "mul" and len(ran.sources) == 2 and ran.sources[0] == ran.sources[1] is not None
        if ran.name == "square" or twice or (ran.name == "pow" and ran.numbers[:1] == (2.0,)):
            squares.add(index)
        elif squares & {s for s in ran.sources if s is not None}:
            found.add(index)
            if ran.name not in ROOTS:
                squares.add(index)
    return found


def _depths(seen: Followed, takers: dict[Any, list[Edge]]) -> dict[Any, int]:
    """Return how many backward functions lie between each and the outputs, at least."""
    later: dict[Any, list[Any]] = {}
    for edge in seen.edges:
        later.setdefault(edge.later[0], []).append(edge.later[1])
    depth = {node: 0 for node in later if node not in takers}
    pending = deque(depth)
    while pending:
        node = pending.popleft()
        for inner in later.get(node, ()):
            if inner not in depth:
                depth[inner] = depth[node] + 1
                pending.append(inner)
    return depth


def _way(seen: Followed, edges: list[tuple[int, str, Size, Size]], direction: Direction) -> Way | None:
    if not edges or not edges[0][2].rms or not edges[-1][3].rms:
        return None
    steps: list[Step] = []
    norm: str | None = None
    for ran, node, given, made in edges:
        operation = seen.ran[ran]
        gain = factor(made.rms, given.rms, made.count / given.count) if given.rms and made.rms else 1.0
        here = operation.path if operation.path in seen.norms else None
        if here is not None and here == norm:  # one more operation of the same norm
            last = steps.pop()
            gain *= last.gain
        norm = here
        steps.append(Step(ran, node, gain, _by_design(seen, operation, direction)))
    before, after = edges[0][2], edges[-1][3]
    whole = factor(after.rms, before.rms, after.count / before.count)
    net = whole
    for step in steps:
        if step.by_design:
            net /= step.gain
    return Way(tuple(steps), before, after, whole, net)


def _by_design(seen: Followed, operation: Ran, direction: Direction) -> bool:
    """True if an operation only chooses values, or is part of a norm that does its work.

    A norm does not if the middle one of its rows hardly varies; rows of zeros do not count.
    """
    if operation.name in SELECTIONS:
        return True
    if operation.path in seen.norms:
        spread, eps = seen.norms[operation.path]
    elif operation.name in FUSED_NORMS and operation.spread is not None:
        spread, eps = operation.spread, operation.eps
    else:
        return False
    return direction == "forward" or spread >= max(FAINT * eps**0.5, LEAST)
