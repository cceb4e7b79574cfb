"""Code run in float64 throughout, whatever dtypes it asks for: the reference of a block. The model does not change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hfpatch.comparing.nested import cast, tensors_in, with_tensors
from hfpatch.compat import operators
from hfpatch.tracing.calls import Call, devices

NARROW = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes in whose place float64 is used."""

LARGE = 2**26
"""Elements from which the second operand of a matrix product is converted in parts."""

STRICT = frozenset(
    {
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("lstm", "gru", "rnn_tanh", "rnn_relu", "scaled_dot_product_attention"),
    }
)
"""Functions of torch that compare the dtypes of their operands themselves."""

Step = Callable[[Any, Any, Any, Any], None]
"""Called with an operator, its arguments and keyword arguments, and its result."""


class Watched(operators.DispatchMode):
    """Runs code as it is; each operator is shown to `step` when it has run.

    Args:
        instead: Tensors that are read in the place of others, by the id of those.
        step: Called after each operator; None for nothing.
    """

    def __init__(self, instead: Mapping[int, torch.Tensor] | None = None, step: Step | None = None) -> None:
        super().__init__()
        self.instead, self.step = instead or {}, step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        kwargs = kwargs or {}
        if self.instead:
            args, kwargs = _mapped(args, self._lent), _mapped(kwargs, self._lent)
        out = self.run(func, args, kwargs)
        if self.step is not None:
            self.step(func, args, kwargs, out)
        return out

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator."""
        return func(*args, **kwargs)

    def _lent(self, value: Any) -> Any:
        return self.instead.get(id(value), value) if isinstance(value, torch.Tensor) else value


class _Widened(TorchFunctionMode):
    """Widens the operands of functions that compare dtypes before any operator runs.

    Args:
        lent: Returns what stands for an operand.
    """

    def __init__(self, lent: Callable[[Any], Any]) -> None:
        super().__init__()
        self.lent = lent

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in STRICT:
            args, kwargs = (_mapped(_mapped(given, self.lent), _wide) for given in (args, kwargs))
        return func(*args, **kwargs)


class InFloat64(Watched):
    """Runs code in float64: every operand is widened when an operator reads it, and casts to less give float64.

    Weights and buffers of a model stay as they are. An operator that has no float64 version runs in float32.

    Attributes:
        narrow: Names of those operators.
    """

    def __init__(self, instead: Mapping[int, torch.Tensor] | None = None, step: Step | None = None) -> None:
        super().__init__(instead, step)
        self.narrow: set[str] = set()
        self._functions = _Widened(self._lent)

    def __enter__(self) -> Any:
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        try:
            return super().__exit__(*error)
        finally:
            self._functions.__exit__(*error)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator on float64 operands."""
        name = func.overloadpacket.__name__
        if name == "view" and any(isinstance(a, torch.dtype) for a in args):
            return func(*args, **kwargs)  # the bits of packed weights
        if operators.overwrites(func):
            return _written(func, args, kwargs)
        if operators.moves_only(func):
            wide = any(isinstance(t, torch.Tensor) and t.dtype == torch.float64 for t in _flat((args, kwargs)))
            several = sum(isinstance(t, torch.Tensor) and t.is_floating_point() for t in _flat((args, kwargs))) > 1
            kept = not (wide and several)
            return func(*_mapped(args, _asked if kept else _wide), **_mapped(kwargs, _asked if kept else _wide))
        if name in ("mm", "addmm") and args[-1].numel() > LARGE:
            return _in_parts(func, args, kwargs)
        try:
            return func(*_mapped(args, _wide), **_mapped(kwargs, _wide))
        except (RuntimeError, NotImplementedError):
            self.narrow.add(name)
            return func(*_mapped(args, _float32), **_mapped(kwargs, _float32))


def again(call: Call, mode: Watched, *, rounded: Mapping[str, torch.dtype] | None = None) -> Any:
    """Run a kept call again and return its output; the module and every random state stay as they are.

    Args:
        call: The call.
        mode: `InFloat64`, which gets its arguments in float64, or `Watched`.
        rounded: Dtypes to which tensors among its arguments are rounded first, by name (`arguments_of`).
    """
    args, kwargs = call.arguments()
    exact = isinstance(mode, InFloat64)

    def given(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        dtype = (rounded or {}).get(name, tensor.dtype)
        narrow = tensor if tensor.dtype.itemsize <= dtype.itemsize else cast(tensor, dtype)
        return narrow.double() if exact else narrow.to(tensor.dtype, copy=True)

    args = tuple(with_tensors(value, given, str(i)) for i, value in enumerate(args))
    kwargs = {name: with_tensors(value, given, name) for name, value in kwargs.items()}
    with ExitStack() as stack:
        stack.enter_context(call.as_it_was(args, kwargs))
        stack.enter_context(torch.no_grad())
        if exact:
            for device in devices():
                stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(mode)
        return nn.Module.__call__(call.module, *args, **kwargs)


def arguments_of(call: Call) -> dict[str, torch.Tensor]:
    """Return the tensors among the arguments of a call, by position or name, with keys of nested values after dots."""
    return dict(tensors_in({**{str(i): value for i, value in enumerate(call.args)}, **call.kwargs}))


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator that writes to its first operand; the others are given in the dtype of that one."""
    target = next((t for t in _flat((args, kwargs)) if isinstance(t, torch.Tensor)), None)
    if target is None or not target.is_floating_point():
        return func(*args, **kwargs)

    def fit(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point() and value is not target
        return value.to(target.dtype) if floats else value

    return func(*_mapped(args, fit), **_mapped(kwargs, fit))


def _in_parts(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Return `mm` or `addmm` in float64, with the columns of the second matrix converted in parts."""
    *added, left, right = args
    step = max(1, LARGE // right.shape[0])
    scale = {k: v for k, v in kwargs.items() if k in ("beta", "alpha")}
    left, out = left.double(), []
    for start in range(0, right.shape[1], step):
        part = slice(start, start + step)
        first = [a.double()[..., part] if a.shape[-1] > 1 else a.double() for a in added]
        out.append(func(*first, left, right[:, part].double(), **scale))
    return torch.cat(out, 1)


def _flat(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        for part in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _flat(part)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))  # pyright: ignore[reportUnknownArgumentType]
    else:
        yield value


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_mapped(v, change) for v in value)
    if type(value) is dict:
        return {k: _mapped(v, change) for k, v in value.items()}
    return change(value)


def _asked(value: Any) -> Any:
    """Return float64 for a narrower dtype that is asked for; other values as they are."""
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in NARROW:
        return value.double()
    return _asked(value)


def _float32(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.float()
    return torch.float32 if value is torch.float64 else value
