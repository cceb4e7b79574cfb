"""A change: a torch norm or linear map computes in float32, its weights as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from hfpatch.compat import hooks
from hfpatch.patching.kinds.float32 import for_float32
from hfpatch.patching.kinds.hook_change import HookChange
from hfpatch.patching.kinds.stream import handing, stream_of


@dataclass(frozen=True)
class ComputeInFloat32(HookChange):
    """A forward pre-hook under which torch's norms and linear maps compute in float32, their weights as they are.

    torch wants the input and the weight of a norm in one dtype, and autocast casts what goes into a linear map. So the
    input is handed over in a form that carries the wish to the function itself: there is no state, and nothing to take
    back after the call.
    """

    @property
    def slot(self) -> str:
        return "input compute dtype"

    def write(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        hooks.before(module, self, with_kwargs=True)

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, Any] | None:
        """Hand the stream tensor over for float32. Without `kwargs` it was taken off during this call."""
        stream = None if kwargs is None else stream_of(args, kwargs)
        return None if stream is None or kwargs is None else handing(for_float32(stream), stream, args, kwargs)

    def __str__(self) -> str:
        return "float32"
