"""A place run operation by operation on both sides, in float64: the first operation whose results part."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from hfpatch.comparing.distance import Distance, Exactly, apart
from hfpatch.comparing.exactly import Watched, again
from hfpatch.comparing.lined_up import Side, common
from hfpatch.comparing.nested import cast, tensors_in
from hfpatch.comparing.runs import Unequal
from hfpatch.compat import operators
from hfpatch.model.source import REJECTIONS
from hfpatch.tracing.calls import Call
from hfpatch.tracing.naming.owners import Owners

MOVED = frozenset(
    {
        *(operators.COPY, "copy_", "clone", "empty", "empty_like", "empty_strided", "new_empty", "detach", "alias"),
        *("lift_fresh", operators.RESHAPE, "contiguous", "expand", "zeros_like", "scalar_tensor"),
    }
)
"""Operators that are not compared: they move values or make room for them."""
SAME = 1e-11
"""Relative distance in float64 from which the results of an operation count as parted."""
DRAWS = ("bernoulli_", "native_dropout", "rand_like")


@dataclass(frozen=True)
class Operation:
    """An operation that ran.

    Attributes:
        name: Its name in torch: `add`, `mm`.
        path: Common path of the module whose code ran it.
        numbers: Numbers among its arguments.
        weights: Names of the parameters and buffers among them.
        shape: Shape of its result.
    """

    name: str
    path: str
    numbers: tuple[float, ...]
    weights: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def title(self) -> str:
        """The operation in a few words."""
        return "dropout" if self.name in DRAWS else self.name.rstrip("_")


@dataclass(frozen=True)
class Parting:
    """The first operation where two models part.

    Attributes:
        a, b: The operation in A and in B; None where only the other one runs it.
        value_a, value_b: The element of its result that differs most; None where only one runs it.
        index: Where that element is.
        distance: Relative L2 distance of the results, in float64; infinite if only one is finite.
        float64: True if this shows in float64; False if only as the models are, in their own dtypes.
    """

    a: Operation | None
    b: Operation | None
    value_a: float | None = None
    value_b: float | None = None
    index: tuple[int, ...] = ()
    distance: float = float("inf")
    float64: bool = True

    @property
    def path(self) -> str:
        """Path of the module whose code runs it."""
        found = self.b or self.a
        assert found is not None  # noqa: S101 - one of them is there
        return found.path

    @property
    def sentence(self) -> str:
        """The operation and both values."""
        where = self.path or "the model's own code"
        if self.a is None or self.b is None:
            runs, lacks = ("B", "A") if self.a is None else ("A", "B")
            op = self.b or self.a
            assert op is not None  # noqa: S101
            return f"{runs} runs {op.title} in {where}, {lacks} does not"
        numbers = ""
        differ = [(x, y) for x, y in zip(self.a.numbers, self.b.numbers, strict=False) if x != y]
        if differ:
            numbers = f" with {differ[0][0]:g} in A and {differ[0][1]:g} in B"
        at = f" at {list(self.index)}" if self.index else ""
        other = "" if self.a.name == self.b.name else f" (in B: {self.b.title})"
        return (
            f"{self.a.title}{other} in {where}{numbers}: {_shown(self.value_a)} in A, {_shown(self.value_b)} in B{at}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        ops = {side: None if op is None else vars_of(op) for side, op in (("a", self.a), ("b", self.b))}
        values = {"value_a": self.value_a, "value_b": self.value_b}
        finite = {k: v if v is not None and abs(v) < float("inf") else None for k, v in values.items()}
        return {**ops, **finite, "index": list(self.index), "in_float64": self.float64, "sentence": self.sentence}


def vars_of(op: Operation) -> dict[str, Any]:
    """Return an operation for JSON."""
    return {
        "operation": op.name, "module": op.path, "numbers": [n for n in op.numbers if abs(n) < float("inf")],
        "weights": list(op.weights), "shape": list(op.shape),
    }  # fmt: skip


Ran = list[tuple[Operation, torch.Tensor]]


def parting(exactly: Exactly, found: Unequal, distance: Distance) -> Parting | None:
    """Return the first operation at a place where A and B part; None if it cannot be run so, or none does."""
    in_float64 = distance.exact is not None and distance.exact > SAME
    pair = exactly.pair
    try:
        ran = tuple(_ran(exactly, side, found, exact=in_float64) for side in (pair.a, pair.b))
    except REJECTIONS:
        return None
    first = _first(*ran, exact=in_float64, real=exactly.real(found.key))
    return first if first is None or in_float64 else replace(first, float64=False)


def _ran(exactly: Exactly, side: Side, found: Unequal, *, exact: bool) -> Ran:
    """Return the operations of a block, or between the blocks, that run on the values of A."""
    out: Ran = []
    names = {id(t): common(n) for n, t in (*side.root.named_parameters(), *side.root.named_buffers())}
    record = exactly.a if side is exactly.pair.a else exactly.b
    call = record.calls[found.key].call
    between = found.role != "output"
    if between or call is None:  # the whole model, without its blocks
        call = Call("", side.root, 0, (), {}, {}, [])
    skip = set(side.places.blocks) if between else set[str]()
    with Owners(replace(call, path="" if between else found.key[0]), skip, None) as owners:

        def step(func: Any, args: Any, kwargs: Any, result: Any) -> None:
            name = func.overloadpacket.__name__
            if name in MOVED or operators.views(func) or not owners.active():
                return
            tensor = next((t for _, t in tensors_in(result) if t.is_floating_point()), None)
            if tensor is None:
                return
            known = tuple(names[id(v)] for v in _leaves((args, kwargs)) if id(v) in names)
            numbers = tuple(float(v) for v in _leaves((args, kwargs)) if _is_number(v))
            op = Operation(name, common(owners()[0]), numbers, known, tuple(tensor.shape))
            out.append((op, tensor.detach().clone()))

        if between:
            if not exact:
                raise ValueError("between the blocks, only what float64 shows is looked at")
            exactly.containers(side, rounded=True, step=step)
        elif exact:
            exactly.block(side, found.key, step=step)
        else:
            again(call, Watched(None, step))
    return out


def _first(a: Ran, b: Ran, *, exact: bool, real: torch.Tensor | None) -> Parting | None:
    """Return the first operation that parts: equal operations are lined up, and their results compared in order."""
    keys = [[(op.name, op.path, op.shape) for op, _ in ran] for ran in (a, b)]
    lost: tuple[Operation | None, Operation | None] = (None, None)
    for tag, i, j, k, m in difflib.SequenceMatcher(None, *keys, autojunk=False).get_opcodes():
        if tag != "equal":
            mine, theirs = (next((op for op, _ in ran), None) for ran in (a[i:j], b[k:m]))
            draws = [op for ran in (a[i:j], b[k:m]) for op, _ in ran if op.name in DRAWS]
            if lost == (None, None) or draws:
                lost = (mine, theirs)
                if draws:
                    lost = (draws[0] if draws[0] in [o for o, _ in a[i:j]] else None, None)
                    lost = (lost[0], None if lost[0] is not None else draws[0])
            continue
        for (one, x), (other, y) in zip(a[i:j], b[k:m], strict=True):
            gap = apart({"": x}, {"": y}, real) if exact else _nonfinite(x, y)
            if gap <= SAME:
                lost = (None, None) if exact else lost
                continue
            if lost != (None, None):
                return _unmatched(*lost, x, y, gap)
            return _at(one, other, x, y, gap)
    if lost != (None, None) and exact:
        return _unmatched(*lost, None, None, float("inf"))
    return None


def _unmatched(a: Operation | None, b: Operation | None, x: Any, y: Any, gap: float) -> Parting:
    if a is None or b is None or x is None:
        return Parting(a, b, distance=gap)
    return replace(_at(a, b, x, y, gap), a=a, b=b)


def _at(a: Operation, b: Operation, x: torch.Tensor, y: torch.Tensor, gap: float) -> Parting:
    one, other = x.double(), y.double().to(x.device)
    apart_by = (one - other).abs().nan_to_num(nan=float("inf"))
    place = int(apart_by.flatten().argmax())
    index: tuple[int, ...] = ()
    if one.dim():
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place, device="cpu"), one.shape))
    return Parting(a, b, float(one.flatten()[place]), float(other.flatten()[place]), index, gap)


def _nonfinite(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return infinity if only one of two tensors is finite, else 0."""
    return 0.0 if bool(cast(x, torch.float64).isfinite().all()) == bool(y.isfinite().all()) else float("inf")


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for part in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _leaves(part)
    elif isinstance(value, dict):
        for part in value.values():  # pyright: ignore[reportUnknownVariableType]
            yield from _leaves(part)
    else:
        yield value


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
