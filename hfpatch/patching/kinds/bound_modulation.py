"""A change that replaces 1 + tanh in a module's own forward with a bounded factor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hfpatch.compat import hooks
from hfpatch.patching.kinds.hook_change import HookChange
from hfpatch.patching.kinds.one_plus_tanh import Bounded, Enter, Leave, clear_over
from hfpatch.patching.kinds.states import State
from hfpatch.patching.tanh.in_code import may_add_one

Pairs = tuple[tuple[nn.Module, Enter, Leave], ...]
"""Modules with the hooks that are set on them; the edited module comes first."""


@dataclass(frozen=True)
class BoundModulation(HookChange):
    """Replaces 1 + tanh in a module's own forward with a bounded factor. `before` holds the hooks, by module."""

    bounds: Bounded

    @property
    def slot(self) -> str:
        return "1 + tanh"

    @property
    def after(self) -> Bounded:
        return self.bounds

    def inverse(self, root: nn.Module, module: nn.Module) -> Pairs:
        enters = [(module, Enter(self.bounds)), *((each, Enter(None)) for each in _to_hide(module))]
        return tuple((each, enter, Leave(enter)) for each, enter in enters)

    def write(self, root: nn.Module, module: nn.Module, before: Pairs) -> None:
        for each, enter, leave in before:
            # The edited module's mode is the innermost of its call, a hiding mode the outermost, so they can be nested.
            own = each is module
            hooks.before(each, enter, with_kwargs=True, first=not own)
            hooks.after(each, leave, first=own, always=True)

    def restore(self, root: nn.Module, module: nn.Module, before: Pairs) -> None:
        super().restore(root, module, before)
        clear_over()

    def hooks(self, module: nn.Module, before: Pairs) -> Iterable[tuple[nn.Module, tuple[Any, ...]]]:
        return ((each, (enter, leave)) for each, enter, leave in before)

    def read(self, root: nn.Module, module: nn.Module, before: Pairs) -> State:
        hooked = {id(each) for each, _, _ in before}
        new = [type(each).__name__ for each in _to_hide(module) if id(each) not in hooked]
        if new:
            return State("gone", f"without the hooks that protect the 1 + tanh of a new {new[0]} inside it")
        return super().read(root, module, before)


def _to_hide(module: nn.Module) -> list[nn.Module]:
    """Return the modules inside a module that may compute their own 1 + tanh."""
    return [each for each in module.modules() if each is not module and may_add_one(each)]
