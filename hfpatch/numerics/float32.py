"""Tensors that make torch's norms and linear layers, and GPT-2's Conv1D, compute in float32.

The type of the argument decides, by `__torch_function__`: these functions then compute in float32 and outside
autocast, and the weights stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hfpatch.compat.functions import AsPlain
from hfpatch.numerics.linear_in_parts import linear_in_float32, outside_autocast


def for_float32(value: Any) -> Any:
    """Return a floating-point tensor as a `Float32Compute` or its proxy, and any other value unchanged."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    if type(value) in (torch.Tensor, nn.Parameter, Float32Compute):
        return value.as_subclass(Float32Compute)
    return Float32ComputeProxy(value)


class Float32Compute(torch.Tensor):
    """A tensor for which the functions in `COMPUTED_IN_FLOAT32` compute in float32 and outside autocast.

    All other functions treat it as a plain tensor, and those in `RESHAPED` return another such tensor.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function. Its result is a plain tensor, unless it is the argument itself, or that in another shape."""
        kwargs = kwargs or {}
        if func in RESHAPED:
            with AsPlain():
                return func(*args, **kwargs).as_subclass(cls)
        if func not in COMPUTED_IN_FLOAT32:
            with AsPlain():
                return func(*args, **kwargs)
        if func is functional.linear:
            with AsPlain():
                return linear_in_float32(*map(_untyped, args), **{k: _untyped(v) for k, v in kwargs.items()})
        device = next(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)).device.type
        with outside_autocast(device), AsPlain():
            return func(*map(_float32, args), **{k: _float32(v) for k, v in kwargs.items()})


class Float32ComputeProxy:
    """Stands for a tensor of another subclass (fake, distributed), as `Float32Compute` does for a plain tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["tensor"], name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function on the tensor."""
        args, kwargs = _plain(tuple(args)), {k: _plain(v) for k, v in (kwargs or {}).items()}
        if func not in COMPUTED_IN_FLOAT32:
            return func(*args, **kwargs)
        device = next(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)).device.type
        with outside_autocast(device):
            return func(*map(_float32, args), **{k: _float32(v) for k, v in kwargs.items()})


def _operator(name: str) -> Any:
    def method(self: Float32ComputeProxy, *others: Any) -> Any:
        return getattr(self.tensor, name)(*map(_plain, others))

    return method


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "pow", "neg", "getitem"):
    setattr(Float32ComputeProxy, f"__{_name}__", _operator(f"__{_name}__"))


COMPUTED_IN_FLOAT32 = frozenset(
    {
        *(functional.layer_norm, torch.layer_norm, functional.rms_norm, torch.rms_norm, functional.linear),
        *(functional.conv1d, functional.conv2d, functional.conv3d),
        *(torch.addmm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__),  # Conv1D, FalconLinear
    }
)
RESHAPED = frozenset({torch.Tensor.view})
"""What Conv1D calls before its product."""


def _plain(value: Any) -> Any:
    if isinstance(value, Float32ComputeProxy):
        return value.tensor
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def _untyped(value: Any) -> Any:
    """Return a `Float32Compute` as a plain tensor; also while torch.compile traces, which knows no `as_subclass`."""
    return value.view_as(value) if isinstance(value, Float32Compute) else value


def _float32(value: Any) -> Any:
    """Return a tensor as a plain float32 tensor: a dispatch mode (make_fx) refuses unknown subclasses."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    plain = (
        value.as_subclass(torch.Tensor)
        if type(value) is Float32Compute and not torch.compiler.is_compiling()
        else value
    )
    return plain.float()
