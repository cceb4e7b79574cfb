"""A change that hands out a copy of a module's output where gradients flow."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hfpatch.compat import hooks
from hfpatch.numerics.outputs import copied, requires_gradient
from hfpatch.patching.kinds.hook_change import HookChange


@dataclass(frozen=True)
class CopyOutput(HookChange):
    """A forward hook that replaces a module's output tensor, or the first item of an output tuple, by a copy.

    The copy has the same values and is no leaf of autograd's graph, so that later code may write into it. Without
    gradients nothing is copied.

    Attributes:
        begins: True to copy in training mode where no gradient flows yet, and let gradients flow from there on. False
            to copy only what requires a gradient, or what a later hook of other code may make require one.
    """

    begins: bool

    @property
    def slot(self) -> str:
        return "gradients of the output" if self.begins else "copy of the output"

    @property
    def place(self) -> Hashable:
        return CopyOutput, self.begins

    def write(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        hooks.after(module, self)

    def __call__(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        """Return the output with its tensor copied; None, which changes nothing, where no gradient is to flow."""
        if requires_gradient(output):
            return None if self.begins else copied(output)
        wanted = module.training if self.begins else hooks.followed(module, self)
        return copied(output) if wanted else None

    def __str__(self) -> str:
        return "copied, with gradients" if self.begins else "copied"
