"""A tensor that makes every function of a module compute in float32: its maps, adapters and experts, whatever they are.

The type of the argument decides, by `__torch_function__`, as for `Float32Compute`; here the results have the type too.
"""

from __future__ import annotations

from typing import Any

import torch

from hfpatch.compat.functions import AsPlain
from hfpatch.numerics.linear_in_parts import check_unpacked, outside_autocast


class Float32Inside(torch.Tensor):
    """A float32 tensor. Functions of it compute in float32 and outside autocast, and return such tensors.

    A cast to a narrower dtype is left out. What a function overwrites keeps its dtype.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function with its other half-precision arguments in float32."""
        with AsPlain():
            return _run(func, tuple(args), kwargs or {})


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in NARROWING:
        return args[0]
    if func in CASTS:
        args, kwargs = (args[0], *map(_wide, args[1:])), {k: _wide(v) for k, v in kwargs.items()}
    writes = func in WRITES
    kept = args[:1] if writes else ()
    to = args[0].dtype if writes else torch.float32
    args = (*kept, *(_as_dtype(a, to) for a in args[len(kept) :]))
    kwargs = {k: v if k == "out" else _as_dtype(v, to) for k, v in kwargs.items()}
    tensor = next((a for a in args if isinstance(a, torch.Tensor)), None)
    with outside_autocast("meta" if tensor is None else tensor.device.type):
        out = func(*args, **kwargs)
    return out if writes else _typed(out)


NARROWING = frozenset({torch.Tensor.half, torch.Tensor.bfloat16})
CASTS = frozenset({torch.Tensor.to, torch.Tensor.type, torch.Tensor.type_as})
WRITES = frozenset(
    getattr(torch.Tensor, name)
    for name in dir(torch.Tensor)
    if (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iadd__", "__isub__", "__imul__")
)
"""Functions that cast to half precision, that cast to what they are given, and that write to their argument."""


def for_float32_inside(value: Any) -> Any:
    """Return a floating-point tensor as a `Float32Inside`, and any other value unchanged."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.float().as_subclass(Float32Inside)


def plain(value: Any) -> Any:
    """Return a value with the tensors in it as plain ones."""
    if isinstance(value, Float32Inside):
        with AsPlain():
            return value.view_as(value)  # torch.compile does not know as_subclass(torch.Tensor)
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def _typed(value: Any) -> Any:
    """Return the results of a function, with floating-point tensors typed."""
    if isinstance(value, torch.Tensor):
        return value.as_subclass(Float32Inside) if value.is_floating_point() else value
    return type(value)(map(_typed, value)) if type(value) in (list, tuple) else value


def _as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Return a value with the floating-point tensors in it in another dtype."""
    if isinstance(value, torch.Tensor):
        check_unpacked(value)
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    return type(value)(_as_dtype(v, dtype) for v in value) if type(value) in (list, tuple) else value


def _wide(target: Any) -> Any:
    """Return the target of a cast, with float32 in place of half precision."""
    if isinstance(target, torch.Tensor):
        return target.float()
    return torch.float32 if target in (torch.float16, torch.bfloat16) else target
