"""Watches the operations of one call, under a dispatch mode, for the first that makes what is not finite.

An operation is an *origin* if its result holds a NaN or an infinity that none of its operands explains. -Inf that is
written on purpose (`masked_fill`, a constant) is *meant*, and so is what an addition or a `where` carries on from it.
Each origin's mark follows the values through later operations; an origin whose mark does not reach the result of the
call did no harm: `exp(-inf)` is 0.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, ValuesView
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hfpatch.compat import operators
from hfpatch.compat.autograd import version
from hfpatch.tracing.tensors import floating, local

UNINITIALISED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
SOFTMAX = operators.SOFTMAX | {"softmax", "log_softmax"}


@dataclass(frozen=True)
class Operand:
    """What an operation was given, as it was then.

    Attributes:
        name: Of the parameter or buffer it is; empty for what was computed.
        shape, dtype: Of the tensor.
        largest: Largest finite magnitude.
        at: Its value at the place where the result first went wrong, for operations that work element by element.
        least: Smallest magnitude.
        nonfinite: Whether it held something that is not finite.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    largest: float
    least: float
    at: float | None
    nonfinite: bool


@dataclass(frozen=True)
class Origin:
    """The operation that made the first bad value of a call.

    Attributes:
        name: Of the operation in torch (`add`, `mm`, `_softmax`).
        node: Of the backward function it ran in (`MulBackward0`); empty in a forward pass.
        module: Path of the module whose code ran it.
        operands: What it was given, in order.
        result: dtype of the result.
        holds: `nan`, `+inf` or `-inf`: what the first bad element is.
        exact: The element worked out in float64 from the operands, where that is simple; None elsewhere.
        after_softmax: A softmax ran before it in the same module.
        masked: A softmax, and an operand had a row of nothing but -Inf.
        vanished: The last small number (an eps) that was 0 in its dtype in the same module; None if there was none.
        numbers: Numbers among its arguments.
        given: An operand held a NaN or an infinity when the call began.
    """

    name: str
    node: str
    module: str
    operands: tuple[Operand, ...]
    result: torch.dtype
    holds: str
    exact: float | None
    after_softmax: bool
    masked: bool
    vanished: float | None = None
    numbers: tuple[float, ...] = ()
    given: bool = False


@dataclass
class _Known:
    ref: weakref.ref[torch.Tensor]
    version: int
    bad: bool  # NaN or +Inf, or a -Inf that was not meant
    neginf: bool
    marks: frozenset[int]


class Operations(operators.DispatchMode):
    """Watches while it is entered; `where` tells the module whose code runs, and the backward function."""

    def __init__(
        self,
        module: nn.Module,
        where: Callable[[], tuple[str, str]],
        *,
        active: Callable[[], bool],
        first_only: bool,
    ) -> None:
        super().__init__()
        self.where, self.active, self.first_only = where, active, first_only
        self.names = {id(t): n.rpartition(".")[2] for n, t in (*module.named_parameters(), *module.named_buffers())}
        self._vanished: dict[str, float] = {}
        self.origins: list[Origin] = []
        self._known: dict[int, _Known] = {}
        self._storages: dict[int, frozenset[int]] = {}
        self._softmaxed: set[str] = set()

    def marks(self, values: Any) -> frozenset[int]:
        """Numbers of the origins (`self.origins[n]`) whose marks a value carries."""
        found: frozenset[int] = frozenset()
        for _, tensor in floating(values):
            found |= self._look(tensor).marks
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at what it made."""
        kwargs = kwargs or {}
        if not self.active():
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        operands = [t for _, t in floating((args, kwargs))]
        before = [self._look(t) for t in operands]
        if operators.overwrites(func):  # what it was given is gone afterwards
            operands = [t.detach().clone() for t in operands]
        out = func(*args, **kwargs)
        base = name.removesuffix("_") if not name.startswith("__") else name
        module, node = self.where()
        if base in UNINITIALISED:
            return out
        for _, result in floating(out):
            if base in ("add", "clamp_min", "clamp", "maximum") and (small := _vanishes(args, kwargs, result.dtype)):
                self._vanished[module] = small
            self._judge(base, module, node, args, kwargs, operands, before, result)
        if base in SOFTMAX:
            self._softmaxed.add(module)
        return out

    def _judge(
        self,
        name: str,
        module: str,
        node: str,
        args: Any,
        kwargs: Any,
        operands: list[torch.Tensor],
        before: list[_Known],
        result: torch.Tensor,
    ) -> None:
        nan, posinf, neginf = _flags(result)
        carried = frozenset[int]().union(*(k.marks for k in before))
        given = any(k.bad and not k.marks for k in before)
        meant = (
            any(k.neginf for k in before) or _writes_neginf(args, kwargs) or (neginf and _adds_masks(name, operands))
        )
        bad = nan or posinf or (neginf and not meant)
        masked_row = (
            name in SOFTMAX and nan and not any(_has_nan_or_posinf(k, t) for k, t in zip(before, operands, strict=True))
        )
        marks = carried if (nan or posinf or neginf) else frozenset[int]()
        filled = all(self.origins[m].name in ("add", "sub") for m in carried)  # a mask added to a logit, not a logit
        masked_row = masked_row and filled
        if bad and (not carried or masked_row):
            made = self._origin(name, module, node, operands, before, result, masked=masked_row, nan=nan, posinf=posinf)
            self.origins.append(replace(made, given=given, numbers=tuple(_numbers((args, kwargs.values())))))
            marks = frozenset({len(self.origins) - 1})
            if self.first_only:
                raise Found
        self._remember(result, bad, neginf, marks)

    def _origin(
        self,
        name: str,
        module: str,
        node: str,
        operands: list[torch.Tensor],
        before: list[_Known],
        result: torch.Tensor,
        *,
        masked: bool,
        nan: bool,
        posinf: bool,
    ) -> Origin:
        held = local(result.detach())
        wrong = held.isnan() if nan else held == (float("inf") if posinf else float("-inf"))
        place = [int(i) for i in wrong.nonzero()[0]] if held.dim() else []
        return Origin(
            name=name,
            node=node,
            module=module,
            operands=tuple(
                _operand(self.names.get(id(t), ""), t, k, place) for t, k in zip(operands, before, strict=True)
            ),
            vanished=self._vanished.get(module),
            result=result.dtype,
            holds="nan" if nan else "+inf" if posinf else "-inf",
            exact=_exact(name, operands, place),
            after_softmax=module in self._softmaxed,
            masked=masked,
        )

    def _look(self, tensor: torch.Tensor) -> _Known:
        known = self._known.get(id(tensor))
        if known is not None and known.ref() is tensor and known.version == version(tensor):
            return known
        nan, posinf, neginf = _flags(tensor)
        marks = self._storages.get(_storage(tensor), frozenset()) if nan or posinf or neginf else frozenset[int]()
        return self._remember(tensor, nan or posinf or (neginf and bool(marks)), neginf, marks)

    def _remember(self, tensor: torch.Tensor, bad: bool, neginf: bool, marks: frozenset[int]) -> _Known:
        known = _Known(weakref.ref(tensor), version(tensor), bad, neginf, marks)
        self._known[id(tensor)] = known
        if marks:
            key = _storage(tensor)
            self._storages[key] = self._storages.get(key, frozenset()) | marks
        return known


class Found(BaseException):
    """Ends a replay at the first origin; not an Exception, so that nothing on the way handles it."""


def _flags(tensor: torch.Tensor) -> tuple[bool, bool, bool]:
    """Whether there is a NaN, a +Inf, a -Inf."""
    held = local(tensor.detach())
    if held.numel() == 0:
        return False, False, False
    if held.is_complex():
        held = torch.view_as_real(held)
    if held.dtype.itemsize == 1:
        held = held.float()
    low, high = (float(v) for v in torch.aminmax(held))
    if math.isfinite(low) and math.isfinite(high):
        return False, False, False
    return bool(held.isnan().any()), bool((held == float("inf")).any()), bool((held == float("-inf")).any())


def _has_nan_or_posinf(known: _Known, tensor: torch.Tensor) -> bool:
    if not known.bad:
        return False
    nan, posinf, _ = _flags(tensor)
    return nan or posinf


def _storage(tensor: torch.Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()


def _writes_neginf(args: Any, kwargs: Any) -> bool:
    """Whether -Inf is among the numbers an operation was given (`masked_fill(mask, -inf)`, `full`)."""
    return float("-inf") in _numbers((args, kwargs.values()))


def _adds_masks(name: str, operands: list[torch.Tensor]) -> bool:
    """Whether additive masks are summed, of order and of padding: they hold the dtype's lowest, and nothing above 0."""
    return name == "add" and all(
        t.numel() and float(t.min()) == torch.finfo(t.dtype).min and float(t.max()) <= 0 for t in operands
    )


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)
    elif isinstance(value, (tuple, list, ValuesView)):
        for part in value:
            yield from _numbers(part)


def _vanishes(args: Any, kwargs: Any, dtype: torch.dtype) -> float | None:
    """A small positive number among the arguments of an operation that is 0 in its dtype."""
    numbers = _numbers((args, kwargs.values()))
    return next((n for n in numbers if 0 < n < 1e-3 and float(torch.tensor(n, dtype=dtype)) == 0), None)


def _operand(name: str, tensor: torch.Tensor, known: _Known, place: list[int]) -> Operand:
    held = local(tensor.detach())
    if held.is_complex():
        held = held.abs()
    wide = held.double()
    finite = wide[wide.isfinite()].abs()
    return Operand(
        name=name,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        largest=float(finite.max()) if finite.numel() else 0.0,
        least=float(finite.min()) if finite.numel() else 0.0,
        at=_at(wide, place),
        nonfinite=known.bad or known.neginf,
    )


def _at(tensor: torch.Tensor, place: list[int]) -> float | None:
    """The element of an operand that is broadcast to a place of the result."""
    if tensor.dim() > len(place):
        return None
    index = place[len(place) - tensor.dim() :]
    sizes = tensor.shape
    if any(size not in (1,) and i >= size for size, i in zip(sizes, index, strict=True)):
        return None
    return float(tensor[tuple(0 if size == 1 else i for size, i in zip(sizes, index, strict=True))])


def _exact(name: str, operands: list[torch.Tensor], place: list[int]) -> float | None:
    """One element of a matrix product in float64."""
    pair = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "mv": (0, 1), "dot": (0, 1)}.get(name)
    if pair is None or len(operands) <= pair[1]:
        return None
    left, right = (local(operands[i].detach()) for i in pair)
    if left.is_complex() or len(place) < left.dim():
        return None
    row = left[tuple(place[:-1])] if left.dim() > 1 else left
    column = right[(*place[:-2], slice(None), place[-1])] if right.dim() > 1 else right
    if row.shape != column.shape:
        return None
    return float(row.double() @ column.double())
