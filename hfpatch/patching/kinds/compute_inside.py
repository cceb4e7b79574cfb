"""A change that runs everything in a module in float32, and keeps the dtype of its weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hfpatch.compat import hooks
from hfpatch.numerics.float32_inside import for_float32_inside, plain
from hfpatch.patching.kinds.hook_change import HookChange
from hfpatch.patching.kinds.stream import handing, stream_of


@dataclass(frozen=True)
class ComputeInside(HookChange):
    """A pair of hooks: the stream enters as a `Float32Inside`, and what comes out is a plain float32 tensor.

    All that computes with it inside does so in float32, also adapters that are added later and weights that are not
    those of a linear layer. `before` holds the hooks.
    """

    widens = True

    @property
    def slot(self) -> str:
        return "compute dtype inside"

    def inverse(self, root: nn.Module, module: nn.Module) -> tuple[Enter, Leave]:
        return Enter(), Leave()

    def write(self, root: nn.Module, module: nn.Module, before: tuple[Enter, Leave]) -> None:
        hooks.before(module, before[0], with_kwargs=True)
        hooks.after(module, before[1])

    def hooks(self, module: nn.Module, before: tuple[Enter, Leave]) -> Iterable[tuple[nn.Module, tuple[Any, ...]]]:
        return ((module, before),)

    def __str__(self) -> str:
        return "float32"


class Enter:
    """The hook before the forward."""

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, Any] | None:
        """Replace the stream tensor. Without `kwargs` the hook was removed during this call."""
        if kwargs is None:
            return None
        stream = stream_of(args, kwargs)
        return handing(for_float32_inside(stream), stream, args, kwargs)


class Leave:
    """The hook after the forward."""

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Return the output with plain tensors."""
        return plain(output)
