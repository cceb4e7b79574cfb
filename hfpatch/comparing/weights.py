"""The weights of two models, compared by name in a stream: one pair of tensors at a time, in parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hfpatch.comparing.lined_up import Pair, Side, common
from hfpatch.compat.modules import buffers, parameters, unsaved
from hfpatch.compat.quantising.quantised import Coded, coded

PART = 2**24
"""Elements that are compared at a time."""

State = Literal["equal", "rounded", "differs", "shape", "only in A", "only in B", "away"]


@dataclass(frozen=True)
class Weight:
    """A parameter, or a buffer, of the two models.

    Attributes:
        path: Common path of its module.
        name: Its name there.
        state: `equal` bit for bit; `rounded`: equal when the wider one is rounded to the dtype of the other; `differs`;
            `shape`: of another shape; `only in A`, `only in B`; `away`: its values are not in this process.
        distance: Relative L2 distance ||a - b|| / ||a||, where it differs; 1 if all of A's is 0; infinite if one is not
            finite.
        a, b: Dtype, or how a quantiser packed it, and shape of each, as text; empty where there is none.
        buffer: True for a buffer.
    """

    path: str
    name: str
    state: State
    distance: float = 0.0
    a: str = ""
    b: str = ""
    buffer: bool = False

    @property
    def full(self) -> str:
        """Path and name."""
        return f"{self.path}.{self.name}" if self.path else self.name


def weights(pair: Pair) -> tuple[Weight, ...]:
    """Compare every parameter and buffer. Memory: a few parts of one tensor, in float64."""
    a, b = tensors(pair.a), tensors(pair.b)
    return tuple(_compared(key, a.get(key), b.get(key)) for key in dict.fromkeys([*a, *b]))


def tensors(side: Side) -> dict[tuple[str, str, bool], torch.Tensor | Coded]:
    """Return every parameter and buffer by common path of its module, its name, and True for a buffer.

    What a quantiser packed is called `weight`, and is unpacked by `values`.
    """
    out: dict[tuple[str, str, bool], torch.Tensor | Coded] = {}
    for path, module in side.survey.modules.items():
        found = coded(module)
        for name, value in parameters(module).items():
            if found is not None and name == found.name:
                out[common(path), "weight", False] = found
            elif value is not None:
                out[common(path), name, False] = value
        for name, value in buffers(module).items():
            if value is not None:
                out[common(path), name, True] = value
    return out


def values(held: torch.Tensor | Coded) -> torch.Tensor:
    """Return a tensor as it is, or the values of one that a quantiser packed."""
    return held if isinstance(held, torch.Tensor) else held.values().detach()


def stored(side: Side) -> set[tuple[str, str]]:
    """Return path and name of the buffers that no state dict holds."""
    return {(common(p), name) for p, module in side.survey.modules.items() for name in unsaved(module)}


def ties(side: Side) -> dict[str, str]:
    """Return each parameter that is another one's tensor -> the name of that one."""
    first: dict[int, str] = {}
    out: dict[str, str] = {}
    for path, module in side.survey.modules.items():
        for name, value in parameters(module).items():
            if value is not None:
                full = f"{common(path)}.{name}" if path else name
                if id(value) in first and first[id(value)] != full:
                    out[full] = first[id(value)]
                first.setdefault(id(value), full)
    return out


def _compared(
    key: tuple[str, str, bool], of_a: torch.Tensor | Coded | None, of_b: torch.Tensor | Coded | None
) -> Weight:
    path, name, buffer = key
    one, other = (_told(t) for t in (of_a, of_b))
    a, b = (None if t is None else values(t) for t in (of_a, of_b))

    def is_(state: State, distance: float = 0.0) -> Weight:
        return Weight(path, name, state, distance, one, other, buffer)

    if a is None or b is None:
        return is_("only in B" if a is None else "only in A")
    if a.is_meta or b.is_meta:
        return is_("away")
    if a.shape != b.shape or a.is_floating_point() != b.is_floating_point():
        return is_("shape")
    if a.dtype == b.dtype and a.data_ptr() == b.data_ptr() and a.device == b.device and a.stride() == b.stride():
        return is_("equal")
    equal = rounded = True
    gap = 0.0
    for x, y in _parts(a, b):
        if x.dtype == y.dtype and torch.equal(x, y):
            continue
        equal = equal and x.dtype != y.dtype and torch.equal(x.double(), y.double())
        narrow = min(x.dtype, y.dtype, key=lambda d: d.itemsize)
        rounded = rounded and x.dtype != y.dtype and torch.equal(x.to(narrow), y.to(narrow))
        gap += float((x.double() - y.double()).square().sum())
    if equal:
        return is_("equal" if a.dtype == b.dtype else "rounded")
    if rounded:
        return is_("rounded", _root(gap, a))
    return is_("differs", _root(gap, a))


def _told(held: torch.Tensor | Coded | None) -> str:
    if held is None:
        return ""
    kind = held.kind if isinstance(held, Coded) else str(held.dtype).removeprefix("torch.")
    return f"{kind} {list(held.shape)}"


def _root(gap: float, a: torch.Tensor) -> float:
    size = sum(float(part.double().square().sum()) for part, _ in _parts(a, a))
    if gap != gap:  # noqa: PLR0124 - NaN
        return float("inf")
    return (gap / size) ** 0.5 if size else float("inf") if gap == float("inf") else 1.0


def _parts(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    one, other = (_flat(t) for t in (a, b))
    for start in range(0, one.numel(), PART):
        part = other[start : start + PART]
        yield one[start : start + PART], part.to(one.device)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    data: Any = tensor.detach()
    return data.reshape(-1)
