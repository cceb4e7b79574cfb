"""A change that casts the output of a module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from hfpatch.compat import hooks
from hfpatch.patching.kinds.dtype_rule import DtypeRule
from hfpatch.patching.kinds.hook_change import HookChange
from hfpatch.patching.kinds.stream import cast


@dataclass(frozen=True)
class CastOutput(HookChange):
    """A forward hook that casts a module's output tensor."""

    rule: DtypeRule

    @property
    def slot(self) -> str:
        return "output dtype"

    def write(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        hooks.after(module, self)

    def __call__(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        """Cast the output, if its dtype differs."""
        return cast(output, self.rule.of(module))

    def __str__(self) -> str:
        return str(self.rule)
