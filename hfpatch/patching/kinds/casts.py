"""The forward hooks that casts are made of: picklable values that hold no module.

torch's own hooks survive deepcopy, DDP, accelerate's forward wrapping and activation checkpointing, and
leave class and `forward` alone.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hfpatch.compat.functions import AsPlain
from hfpatch.compat.sharding import narrows_stream
from hfpatch.dtypes import dtype_name
from hfpatch.errors import RefusedError
from hfpatch.model.roles import weights_dtype


@dataclass(frozen=True)
class DtypeRule:
    """Which dtype a cast goes to.

    Args:
        dtype: The dtype, where `weight` is empty or gives no floating-point weight (quantised layers).
        weight: Path within the module to a layer whose weight's dtype is followed, so that the cast stays
            right after `model.float()` or `model.half()`.
    """

    dtype: torch.dtype
    weight: tuple[str, ...] | None = None

    def of(self, module: nn.Module) -> torch.dtype:
        """The dtype for this module, now."""
        if self.weight is None:
            return self.dtype
        holder: Any = module
        for name in self.weight:
            holder = getattr(holder, name, None)
        weight = getattr(holder, "weight", None)
        if weight is None:  # the layer was replaced since, by one of another form
            return weights_dtype(module) or self.dtype
        return weight.dtype if weight.dtype.is_floating_point else self.dtype

    def __str__(self) -> str:
        return dtype_name(self.dtype) if self.weight is None else "that of its weights"


def dtype_rule(to: str, module: nn.Module, compute: torch.dtype | None, stream: torch.dtype | None) -> DtypeRule:
    """The rule for a module: `float32`, or `weights` to follow a layer that has the module's usual dtype.

    Where the weights are in another dtype than the model computes in (norms kept in float32), the
    compute dtype is fixed instead.
    """
    if to == "float32":
        return DtypeRule(torch.float32)
    usual = weights_dtype(module)
    fallback = compute or stream or usual or torch.float16
    if stream is not None and usual != stream:
        return DtypeRule(fallback)
    for path, layer in module.named_modules():
        weight = getattr(layer, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dtype == usual and not path.startswith("lora_"):
            return DtypeRule(fallback, tuple(path.split(".")) if path else ())
    return DtypeRule(fallback)


@dataclass(frozen=True, eq=True)
class CastInput:
    """A forward pre-hook that casts the stream tensor: the first argument, or `hidden_states`, wherever it is passed.

    Masks, position embeddings and caches are left as they are: a cast would turn a float32 mask's
    lowest value into -inf.
    """

    rule: DtypeRule

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, Any] | None:
        """Cast if there is something to cast. Without `kwargs` it was taken off during this call, and does nothing.

        Raises:
            RefusedError: FSDP would cast the float32 stream back on its way through the module.
        """
        if kwargs is None:
            return None
        if self.rule.weight is None and (why := narrows_stream(module)):
            raise RefusedError(f"the stream was set to run in float32, and a {type(module).__name__} undoes it: {why}")
        stream = _stream(args, kwargs)
        cast = _cast(stream, self.rule.of(module))
        return None if cast is stream else _handing(cast, stream, args, kwargs)

    def __str__(self) -> str:
        return str(self.rule)


@dataclass(frozen=True, eq=True)
class CastOutput:
    """A forward hook that casts a module's output tensor."""

    rule: DtypeRule

    def __call__(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        """Cast if there is something to cast."""
        return _cast(output, self.rule.of(module))

    def __str__(self) -> str:
        return str(self.rule)


@dataclass(frozen=True, eq=True)
class InFloat32:
    """A forward pre-hook under which torch's norms and linear maps compute in float32, their weights as they are.

    torch wants the input and the weight of a norm in one dtype, and autocast casts what goes into a linear map. So the
    input is handed over as a `Wide` tensor, or as a `Handed` one where the tensor is no plain one: either carries the
    wish to the function itself, so there is no state, and nothing to take back after the call.
    """

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, Any] | None:
        """Hand the stream tensor over as a wide one. Without `kwargs` it was taken off during this call."""
        stream = None if kwargs is None else _stream(args, kwargs)
        return None if stream is None or kwargs is None else _handing(_wide(stream), stream, args, kwargs)

    def __str__(self) -> str:
        return "float32"


class Wide(torch.Tensor):
    """A tensor for which the functions in `WIDENED` compute in float32 and outside autocast; a plain one for others."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function. What it returns is plain, unless it is the tensor itself."""
        kwargs = kwargs or {}
        if func not in WIDENED:
            with AsPlain():
                return func(*args, **kwargs)
        device = next(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)).device.type
        with _outside_autocast(device), AsPlain():
            return func(*map(_float32, args), **{k: _float32(v) for k, v in kwargs.items()})


class Handed:
    """Stands for a tensor of a class of its own (fake, distributed), which cannot be a `Wide` one; else as that is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["tensor"], name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function on the tensor itself."""
        args, kwargs = _plain(tuple(args)), {k: _plain(v) for k, v in (kwargs or {}).items()}
        if func not in WIDENED:
            return func(*args, **kwargs)
        device = next(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)).device.type
        with _outside_autocast(device):
            return func(*map(_float32, args), **{k: _float32(v) for k, v in kwargs.items()})


def _operator(name: str) -> Any:
    def method(self: Handed, *others: Any) -> Any:
        return getattr(self.tensor, name)(*map(_plain, others))

    return method


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "pow", "neg", "getitem"):
    setattr(Handed, f"__{_name}__", _operator(f"__{_name}__"))


WIDENED = frozenset(
    {functional.layer_norm, torch.layer_norm, functional.rms_norm, torch.rms_norm, functional.linear}
)  # fmt: skip


def _wide(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.as_subclass(Wide) if type(value) in (torch.Tensor, nn.Parameter, Wide) else Handed(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Handed):
        return value.tensor
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def _outside_autocast(device: str) -> Any:
    """A region without autocast; an empty one for meta, which has none (asking torch breaks a graph in torch 2.11)."""
    return contextlib.nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


def _float32(value: Any) -> Any:
    """A tensor in float32, a plain one: a dispatch mode (make_fx) refuses classes that it does not know."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    plain = value.as_subclass(torch.Tensor) if type(value) is Wide and not torch.compiler.is_compiling() else value
    return plain.float()


def _stream(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a module reads the stream from: its first argument, `hidden_states`, or the first tensor by name."""
    if args or "hidden_states" in kwargs:
        return args[0] if args else kwargs["hidden_states"]
    return next((v for v in kwargs.values() if isinstance(v, torch.Tensor) and v.is_floating_point()), None)


def _handing(now: Any, stream: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The arguments with another value for the stream, wherever it is passed: CTRL passes it three times."""
    return (
        tuple(now if value is stream else value for value in args),
        {key: now if value is stream else value for key, value in kwargs.items()},
    )


def _cast(value: Any, to: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != to:
        return value.to(to)
    return value
