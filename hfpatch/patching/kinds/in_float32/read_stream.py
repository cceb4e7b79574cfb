"""Changes for modules that meet a float32 stream: a reader with half-precision weights, and code that casts it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.compat import hooks
from hfpatch.compat.functions import AsPlain
from hfpatch.numerics.float32 import for_float32
from hfpatch.patching.kinds.hook_change import HookChange
from hfpatch.patching.kinds.stream import cast, handing, stream_of

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class ReadStream(HookChange):
    """Two forward hooks: a float32 input is computed with in float32, and the output has the dtype of the weights.

    With an input in the dtype of the weights, or with weights in float32, nothing changes.
    """

    @property
    def slot(self) -> str:
        return "input compute dtype"

    def write(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        hooks.before(module, self, with_kwargs=True)
        hooks.after(module, RETURN)

    def hooks(self, module: nn.Module, before: Any) -> Iterable[tuple[nn.Module, tuple[Any, ...]]]:
        return ((module, (self, RETURN)),)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, Any] | None:
        """Replace a float32 stream tensor with a `Float32Compute`. Without `kwargs` the hook was removed just now."""
        if kwargs is None or _half(module) is None:
            return None
        stream = stream_of(args, kwargs)
        if not isinstance(stream, torch.Tensor) or stream.dtype is not torch.float32:
            return None
        return handing(for_float32(stream), stream, args, kwargs)

    def __str__(self) -> str:
        return "float32 if the stream is"


@dataclass(frozen=True)
class ReturnWeightsDtype:
    """A forward hook that casts a float32 output to the dtype of half-precision weights."""

    def __call__(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        """Cast the output, if its dtype differs."""
        dtype = _half(module)
        if dtype is None or not isinstance(output, torch.Tensor) or output.dtype is not torch.float32:
            return None
        return cast(output, dtype)

    def __reduce__(self) -> str:
        return "RETURN"  # so that a copied or pickled model has this very hook


RETURN = ReturnWeightsDtype()


def _half(module: nn.Module) -> torch.dtype | None:
    weight = getattr(module, "weight", None)
    return weight.dtype if isinstance(weight, torch.Tensor) and weight.dtype in HALF else None


CASTS = frozenset({
    torch.Tensor.to, torch.Tensor.type, torch.Tensor.type_as, torch.Tensor.half, torch.Tensor.bfloat16
})  # fmt: skip


class Kept(torch.Tensor):
    """A float32 tensor that a cast to half precision leaves as it is; every result is a plain tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function; of a cast to half precision, return the tensor itself, plain."""
        with AsPlain():
            out = func(*args, **(kwargs or {}))
            if func in CASTS and isinstance(args[0], Kept) and out.dtype in HALF:
                return args[0].as_subclass(torch.Tensor).to(out.device)
        return out


@dataclass(frozen=True)
class KeepFloat32(HookChange):
    """A forward pre-hook that hands a module its float32 stream as a `Kept` tensor."""

    @property
    def slot(self) -> str:
        return "casts of the stream"

    def write(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        hooks.before(module, self, with_kwargs=True)

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, Any] | None:
        """Replace a float32 stream tensor. Without `kwargs` the hook was removed during this call."""
        stream = None if kwargs is None else stream_of(args, kwargs)
        if kwargs is None or type(stream) is not torch.Tensor or stream.dtype is not torch.float32:
            return None
        return handing(stream.as_subclass(Kept), stream, args, kwargs)

    def __str__(self) -> str:
        return "none"
