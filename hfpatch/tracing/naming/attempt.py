"""Runs a call that raised once more, and finds the function that raises, its operands, and what is wrong with them.

Each cause is tried: the function is run again on copies of its operands, in one dtype, with indices at 0, and on meta
tensors, which have shapes and no values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hfpatch.dtypes import dtype_name
from hfpatch.tracing.calls import Call
from hfpatch.tracing.tensors import DEPTH, is_sharded

FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError)
"""Exceptions of model code (`torch.OutOfMemoryError` is a RuntimeError)."""
MISSING = "not implemented"
"""Stands for the message of a function that torch does not have for a dtype or a device."""


@dataclass(frozen=True)
class Operand:
    """A tensor that a function was given; `name` is that of a parameter or buffer, and empty for others."""

    name: str
    tensor: torch.Tensor

    def __str__(self) -> str:
        shape = "x".join(map(str, self.tensor.shape)) or "scalar"
        name = f"{self.name!r}, " if self.name else ""
        return f"{name}{dtype_name(self.tensor.dtype)} [{shape}]"


@dataclass(frozen=True)
class Failure:
    """The function of torch that raises.

    Attributes:
        name: Its name, such as `linear` or `cross_entropy`.
        operands: Its tensors, in order.
        symptom: What is wrong with them, a key of `hfpatch.symptoms.SYMPTOMS`.
        why: The same in words; empty if it is not known.
        index: The tensor with an index out of range; None unless that is the symptom.
    """

    name: str
    operands: tuple[Operand, ...]
    symptom: str
    why: str = ""
    index: torch.Tensor | None = None


def attempt(call: Call, module: str) -> Failure | None:
    """Run a call again and return the function that raises; None if none of torch's does, or if it cannot be run.

    Args:
        call: The call.
        module: Path of the module that raises; its own parameters are named without it.
    """
    if call.used_up is not None or call.overwritten or any(is_sharded(p) for p in call.module.parameters()):
        return None
    named = (*call.module.named_parameters(call.path), *call.module.named_buffers(call.path))
    names = {id(tensor): name.removeprefix(f"{module}.") for name, tensor in named}
    args, kwargs = call.arguments()
    recorder = _Recorder()
    with call.as_it_was(args, kwargs), torch.inference_mode(call.inference), torch.set_grad_enabled(call.grad):
        try:
            with recorder:
                nn.Module.__call__(call.module, *args, **kwargs)
        except FAILURES:
            with torch.no_grad():
                return None if recorder.last is None else _examined(*recorder.last, names)
    return None


class _Recorder(TorchFunctionMode):
    """Keeps the last function of torch that raised: function, arguments, and the first line of the message."""

    def __init__(self) -> None:
        super().__init__()
        self.last: tuple[Callable[..., Any], Any, Any, str] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function."""
        try:
            return func(*args, **(kwargs or {}))
        except FAILURES as error:
            self.last = func, args, kwargs or {}, first_line(error)
            raise


def _examined(func: Callable[..., Any], args: Any, kwargs: Any, message: str, names: dict[int, str]) -> Failure:
    name = str(getattr(func, "__name__", func)).strip("_")
    tensors: list[torch.Tensor] = []
    _mapped((args, kwargs), tensors.append)
    operands = tuple(Operand(names.get(id(t), ""), t) for t in tensors)

    def raises(change: Callable[[int, torch.Tensor], torch.Tensor]) -> str | None:
        """Return the message with which the function raises on changed copies; None if it does not."""
        copies = {id(t): change(i, t if t.is_meta else t.detach().clone()) for i, t in enumerate(tensors)}
        try:
            func(*_mapped(args, lambda t: copies[id(t)]), **_mapped(kwargs, lambda t: copies[id(t)]))
        except NotImplementedError:
            return MISSING
        except FAILURES as error:
            return first_line(error)
        return None

    devices = {t.device.type for t in tensors if t.dim() or t.is_meta}
    if len(devices) > 1:
        return Failure(name, operands, "device-mismatch", f"its operands are on {listed(sorted(devices))}")
    dtypes = {t.dtype for t in tensors if t.is_floating_point()}
    wide = reduce(torch.promote_types, dtypes) if dtypes else None

    def widened(_: int, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(wide) if tensor.is_floating_point() else tensor

    if len(dtypes) > 1 and raises(widened) is None:
        return Failure(name, operands, "mixed-dtypes")
    for place, index in enumerate(tensors):
        whole = index.dtype in (torch.int64, torch.int32) and not index.is_meta
        if whole and raises(lambda i, t, place=place: t.zero_() if i == place else t) is None:
            return Failure(name, operands, "index-out-of-range", _out_of_range(index, _rows(name, operands)), index)
    others = [i for i, o in enumerate(operands) if not o.name and o.tensor.dtype != torch.int64]
    for place in sorted(others, key=lambda i: tensors[i].is_floating_point()):
        if raises(lambda i, t, place=place: torch.zeros_like(t, dtype=torch.int64) if i == place else t) is None:
            why = f"runs if {operands[place]} is int64; cast it with .long()"
            return Failure(name, operands, "mixed-dtypes", why)
    same = raises(lambda i, t: torch.zeros_like(widened(i, t))) == message
    if same and raises(lambda i, t: widened(i, t).to("meta")) not in (None, MISSING):
        return Failure(name, operands, "shape-mismatch")  # whatever the values are, and where there are none
    return Failure(name, operands, "raised")


def _rows(name: str, operands: tuple[Operand, ...]) -> int | None:
    """Return how many rows an embedding or classes a cross entropy has; None for other functions."""
    wide = [o.tensor for o in operands if o.tensor.is_floating_point() and o.tensor.dim()]
    if not wide or name not in ("embedding", "cross_entropy", "nll_loss", "nll_loss_nd"):
        return None
    return wide[0].shape[0] if name == "embedding" or wide[0].dim() == 1 else wide[0].shape[1]


def _out_of_range(index: torch.Tensor, rows: int | None) -> str:
    if rows is None:
        return f"its indices go from {int(index.min())} to {int(index.max())}; with 0 in their place it runs"
    outside = (index >= rows) | ((index < 0) & (index != -100))
    place = outside.nonzero()[0].tolist() if bool(outside.any()) else []
    value = int(index[tuple(place)]) if place else int(index.max())
    return f"the index {value} at {place} is not among the {rows} of its table (0 to {rows - 1})"


def _mapped(value: Any, function: Callable[[torch.Tensor], Any], depth: int = DEPTH) -> Any:
    """Return a value with a function applied to each tensor in its tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if depth and type(value) in (tuple, list):
        return type(value)(_mapped(part, function, depth - 1) for part in value)
    if depth and type(value) is dict:
        return {key: _mapped(part, function, depth - 1) for key, part in value.items()}
    return value


def listed(words: list[str]) -> str:
    """Return words as `a, b and c`."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message."""
    return str(error).partition("\n")[0]
