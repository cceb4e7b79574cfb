"""A change that runs a torch norm or linear layer in float32 and keeps the dtype of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from hfpatch.compat import hooks
from hfpatch.numerics.float32 import for_float32
from hfpatch.patching.kinds.hook_change import HookChange
from hfpatch.patching.kinds.stream import handing, stream_of


def computes_in_float32(module: nn.Module) -> bool:
    """True if a `ComputeInFloat32` is in force on a module."""
    called, _ = hooks.hooks_of(module)
    return any(isinstance(hook, ComputeInFloat32) for hook in called.values())


@dataclass(frozen=True)
class ComputeInFloat32(HookChange):
    """A forward pre-hook that lets torch's norms and linear layers compute in float32, their weights unchanged.

    torch's norms require input and weight in one dtype, and autocast casts the input of a linear layer. So the hook
    replaces the input with a tensor of a subclass, `Float32Compute`, which dispatches the function to float32. There is
    no state to restore after the call.
    """

    widens = True

    @property
    def slot(self) -> str:
        return "input compute dtype"

    def write(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        hooks.before(module, self, with_kwargs=True)

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, Any] | None:
        """Replace the stream tensor with a `Float32Compute`. Without `kwargs` the hook was removed during this call."""
        stream = None if kwargs is None else stream_of(args, kwargs)
        return None if stream is None or kwargs is None else handing(for_float32(stream), stream, args, kwargs)

    def __str__(self) -> str:
        return "float32"
