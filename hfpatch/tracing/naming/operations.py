"""Watches the operations of one call, under a dispatch mode, for those that make bad values, forward and backward.

An operation is an *origin* if its result holds a NaN or an infinity that none of its operands explains. -Inf that is
written on purpose (`masked_fill`, a constant) is *intentional*, and so is -Inf computed from it. The mark of each
origin follows its values through later operations; an origin whose mark does not reach the result of the call did no
harm: `exp(-inf)` is 0. A mark that forward drops (`where`) can come back in the backward pass, from a saved tensor.
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
from hfpatch.tracing.naming.origin import Origin
from hfpatch.tracing.naming.reading import ctc_lengths, exact, line_of, operand, terms
from hfpatch.tracing.tensors import floating, local

UNINITIALISED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
DIVISIONS = {"div", "true_divide", "rsqrt", "reciprocal", "remainder", "fmod"}
PASSING = {
    "view", "reshape", "expand", "unsqueeze", "squeeze", "t", "transpose", "permute", "slice", "select", "detach",
    "alias", "clone", "lift_fresh", "mul", "add", "clamp", "clamp_min", operators.RESHAPE, operators.COPY,
}  # fmt: skip
"""Operations that are left out of `Operand.made`."""
HIDES = {
    "where": "where()",
    "masked_fill": "masked_fill()",
    "masked_scatter": "masked_scatter()",
    "nan_to_num": "nan_to_num()",
    "clamp": "clamp()",
    "clamp_min": "clamp()",
    "clamp_max": "clamp()",
    "minimum": "minimum()",
    "maximum": "maximum()",
    "index_put": "an indexed assignment",
    "copy": "an assignment",
}
"""Operations whose result can leave out values of an operand; each in words."""
NORMS = operators.RMS_NORMS | {
    "native_layer_norm",
    "native_layer_norm_backward",
    "native_group_norm",
    "native_group_norm_backward",
    "native_batch_norm",
    "native_batch_norm_backward",
}
SOFTMAX = operators.SOFTMAX | {"softmax", "log_softmax"}


@dataclass
class _Known:
    ref: weakref.ref[torch.Tensor]
    version: int
    bad: bool  # NaN or +Inf, or -Inf that was not intentional
    neginf: bool
    marks: frozenset[int]


class Operations(operators.DispatchMode):
    """Watches operations inside the context.

    Args:
        module: The module that is called; names its parameters and buffers.
        where: Returns the path of the module whose code runs, and the name of the backward function.
        active: Returns True while operations are to be watched.
        hidden_by: Returns, in a backward pass, the operation that drops the running function's result, or "".

    Attributes:
        origins: The origins so far.
        met: Of origins whose values occurred in the backward pass, in the order in which they did: the operation there
            that first had a NaN in its result, or else an infinity. An operation of the backward pass meets itself.
    """

    def __init__(
        self,
        module: nn.Module,
        where: Callable[[], tuple[str, str]],
        *,
        active: Callable[[], bool] = lambda: True,
        hidden_by: Callable[[], str] = lambda: "",
    ) -> None:
        super().__init__()
        self.where, self.active, self.hidden_by = where, active, hidden_by
        self.met: dict[int, Origin] = {}
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], tuple[str, ...]]] = {}
        self.names = {id(t): n.rpartition(".")[2] for n, t in (*module.named_parameters(), *module.named_buffers())}
        self._vanished: dict[str, float] = {}
        self.origins: list[Origin] = []
        self._known: dict[int, _Known] = {}
        self._storages: dict[int, frozenset[int]] = {}
        self._softmaxed: set[str] = set()

    def name(self, tensors: dict[str, torch.Tensor]) -> None:
        """Name more tensors, which stand for the module's parameters."""
        self.names.update({id(t): n.rpartition(".")[2] for n, t in tensors.items()})

    def marks(self, values: Any) -> frozenset[int]:
        """Return the indices in `self.origins` of the origins whose marks these values carry."""
        found: frozenset[int] = frozenset()
        for _, tensor in floating(values):
            found |= self._look(tensor).marks
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and check its results."""
        kwargs = kwargs or {}
        if not self.active():
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        base = name.removesuffix("_") if not name.startswith("__") else name
        operands = [t for _, t in floating((args, kwargs))]
        if base in DIVISIONS:  # the divisor may be a count
            operands = [t for t in args if isinstance(t, torch.Tensor)]
        before = [self._look(t) for t in operands]
        shared = {_storage(t) for t in operands} if self._storages else set[int]()
        if operators.overwrites(func):  # it overwrites an operand
            operands = [t.detach().clone() for t in operands]
        out = func(*args, **kwargs)
        if base in UNINITIALISED:
            return out
        module, node = self.where()
        self._note(base, args, out)
        keeps = base in NORMS or base.startswith(operators.ATTENTION)  # the later results are for its own backward
        for _, result in floating(out[0] if keeps and isinstance(out, tuple) and not node else out):
            if base in ("add", "clamp_min", "clamp", "maximum") and (small := _vanishes(args, kwargs, result.dtype)):
                self._vanished[module] = small
            if self._storages and (key := _storage(result)) not in shared:
                self._storages.pop(key, None)  # the memory of a tensor that is gone
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
        intentional = (
            any(k.neginf for k in before) or _writes_neginf(args, kwargs) or (neginf and _adds_masks(name, operands))
        )
        bad = nan or posinf or (neginf and not intentional)
        masked_row = (
            name in SOFTMAX and nan and not any(_has_nan_or_posinf(k, t) for k, t in zip(before, operands, strict=True))
        )
        marks = carried if (nan or posinf or neginf) else frozenset[int]()
        filled = all(self.origins[m].name in ("add", "sub") for m in carried)  # a mask added to a logit, not a logit
        masked_row = masked_row and filled
        fresh = bad and (not carried or masked_row)
        if fresh:
            marks = frozenset({len(self.origins)})
        again = [m for m in marks if node and (m not in self.met or (nan and self.met[m].holds != "nan"))]
        if fresh or again:
            made = self._origin(name, module, node, operands, before, result, masked=masked_row, nan=nan, posinf=posinf)
            made = replace(
                made,
                given=given,
                numbers=tuple(_numbers((args, kwargs.values()))),
                lengths=ctc_lengths(args) if name in operators.CTC else None,
                hidden=self.hidden_by() if node else "",
            )
            for mark in again:
                self.met[mark] = made
            if fresh:
                self.origins.append(made)
        if not node and not marks and name in HIDES:
            for mark in carried:
                if not self.origins[mark].hidden:
                    self.origins[mark] = replace(self.origins[mark], hidden=HIDES[name])
        self._remember(result, bad, neginf, marks)

    def _note(self, name: str, args: Any, out: Any) -> None:
        """Remember by which operations a result was made."""
        given = next((self._maker(a) for a in args if isinstance(a, torch.Tensor)), ()) if args else ()
        made = given if name in PASSING else (name, *given)[:4]
        for result in (out,) if isinstance(out, torch.Tensor) else out if isinstance(out, (tuple, list)) else ():
            if isinstance(result, torch.Tensor):
                self._made[id(result)] = (weakref.ref(result), made)

    def _maker(self, tensor: torch.Tensor) -> tuple[str, ...]:
        known = self._made.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else ()

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
        line = line_of(name, operands, place)
        return Origin(
            name=name,
            node=node,
            module=module,
            operands=tuple(
                operand(self.names.get(id(t), ""), t, k.bad or k.neginf, place, self._maker(t))
                for t, k in zip(operands, before, strict=True)
            ),
            vanished=self._vanished.get(module),
            result=result.dtype,
            holds="nan" if nan else "+inf" if posinf else "-inf",
            exact=exact(line),
            terms=terms(line),
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


def _flags(tensor: torch.Tensor) -> tuple[bool, bool, bool]:
    """Return whether a tensor holds a NaN, a +Inf and a -Inf."""
    held = local(tensor.detach())
    if held.numel() == 0:
        return False, False, False
    if held.is_complex():
        held = torch.view_as_real(held)
    if not held.is_floating_point():
        return False, False, False
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
    """True if -Inf is among the numbers in an operation's arguments (`masked_fill(mask, -inf)`, `full`)."""
    return float("-inf") in _numbers((args, kwargs.values()))


def _adds_masks(name: str, operands: list[torch.Tensor]) -> bool:
    """True if only additive masks are summed, such as a causal and a padding mask.

    An additive mask holds the dtype's lowest value and no value above 0.
    """
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
    """Return the first positive number below 1e-3 among an operation's arguments that is 0 in its dtype, or None."""
    numbers = _numbers((args, kwargs.values()))
    return next((n for n in numbers if 0 < n < 1e-3 and float(torch.tensor(n, dtype=dtype, device="cpu")) == 0), None)
