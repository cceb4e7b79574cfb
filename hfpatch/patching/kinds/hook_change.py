"""The base class of changes that set forward hooks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from hfpatch.compat import hooks as tables
from hfpatch.patching.kinds.base import Change
from hfpatch.patching.kinds.states import HERE, State


class HookChange(Change):
    """A change that sets forward hooks. Only these hooks are removed again; they are found by identity, on a copy too.

    By default the change itself is the only hook: a picklable value that holds no module. torch's hooks survive
    deepcopy, DDP, accelerate's wrapping of `forward` and activation checkpointing, and need no change to the class or
    to `forward`.
    """

    unseen = "torch.compile would keep running the code that it has compiled without the hooks"

    def hooks(self, module: nn.Module, before: Any) -> Iterable[tuple[nn.Module, tuple[Any, ...]]]:
        """Return the modules that hooks are set on, each with its hooks."""
        return ((module, (self,)),)

    def read(self, root: nn.Module, module: nn.Module, before: Any) -> State:
        wanted = [(each, hook) for each, hooks in self.hooks(module, before) for hook in hooks]
        missing = sum(not tables.is_set(each, hook) for each, hook in wanted)
        if not missing:
            return HERE
        return State("gone", "without its hook" if len(wanted) == 1 else f"without {missing} of {len(wanted)} hooks")

    def restore(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        for each, hooks in self.hooks(module, before):
            tables.drop(each, [*tables.keys(each, hooks, silent=True), *tables.orphans(each)])

    def suspend(self, root: nn.Module, module: nn.Module, before: Any, held: list[Any]) -> None:
        for each, hooks in self.hooks(module, before):
            tables.silence(each, hooks)

    def resume(self, root: nn.Module, module: nn.Module, before: Any, held: list[Any]) -> None:
        for each, hooks in self.hooks(module, before):
            tables.unsilence(each, hooks)
