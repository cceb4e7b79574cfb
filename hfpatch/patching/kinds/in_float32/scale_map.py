"""A change that computes one linear map with values smaller by a power of two, and gives its output in float32."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.compat import hooks
from hfpatch.errors import RefusedError
from hfpatch.patching.kinds.hook_change import HookChange
from hfpatch.patching.kinds.scale_branch import AGAIN, Calls, Grow
from hfpatch.patching.kinds.stream import handing, stream_of


@dataclass(frozen=True)
class ScaleMap(HookChange):
    """Multiplies the input of a linear map without bias by 2^-exponent, and its output, in float32, by 2^exponent.

    The result is that of the map, but for inputs too small for the dtype. Both hooks are on the map itself: an adapter
    around it, added before or after, gets the input as it is and adds to the float32 output. `before` holds the hooks.

    Args:
        exponent: 8 for values 256 times smaller.
    """

    exponent: int

    widens = True

    @property
    def slot(self) -> str:
        return "map scale"

    def inverse(self, root: nn.Module, module: nn.Module) -> tuple[ShrinkInput, Grow]:
        calls = Calls()
        return ShrinkInput(self.exponent, calls), Grow("", self.exponent, calls)

    def write(self, root: nn.Module, module: nn.Module, before: tuple[ShrinkInput, Grow]) -> None:
        hooks.before(module, before[0], with_kwargs=True)
        hooks.after(module, before[1])

    def hooks(self, module: nn.Module, before: tuple[ShrinkInput, Grow]) -> Iterable[tuple[nn.Module, tuple[Any, ...]]]:
        return ((module, before),)

    def __str__(self) -> str:
        return f"2^-{self.exponent}, float32 at its end"


class ShrinkInput:
    """A forward pre-hook of a linear map: scales its input down."""

    def __init__(self, exponent: int, calls: Calls) -> None:
        self.exponent, self.calls = exponent, calls

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, Any] | None:
        """Return the arguments with the input times 2^-exponent. Without `kwargs` the hook was removed just now.

        Raises:
            RefusedError: The map has a bias since the patch was applied.
        """
        stream = None if kwargs is None else stream_of(args, kwargs)
        if kwargs is None or not isinstance(stream, torch.Tensor):
            return None
        if getattr(module, "bias", None) is not None:
            raise RefusedError(
                f"a {type(module).__name__} runs scaled by a power of two, and has a bias since, which would be scaled "
                f"too; {AGAIN}"
            )
        self.calls.ran[self.calls.thread] = 1
        return handing(stream * 2.0**-self.exponent, stream, args, kwargs)
