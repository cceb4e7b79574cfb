"""What changes that set forward hooks have in common: hooks are found, taken off, put back in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from hfpatch.compat import hooks as tables
from hfpatch.patching.kinds.base import Change
from hfpatch.patching.kinds.states import HERE, State


class HookChange(Change):
    """A change that sets forward hooks. They are found again by identity, also on a copy; only ours go.

    Where nothing else is said, the change itself is the one hook: a picklable value that holds no module. torch's own
    hooks survive deepcopy, DDP, accelerate's forward wrapping and activation checkpointing, and leave class and
    `forward` alone.
    """

    unseen = "torch.compile would go on running the code it made without the hooks"

    def hooks(self, module: nn.Module, before: Any) -> Iterable[tuple[nn.Module, tuple[Any, ...]]]:
        """Return the modules that hooks were set on, each with its hooks."""
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

    def lift(self, root: nn.Module, module: nn.Module, before: Any, held: list[Any]) -> None:
        for each, hooks in self.hooks(module, before):
            tables.silence(each, hooks)

    def lower(self, root: nn.Module, module: nn.Module, before: Any, held: list[Any]) -> None:
        for each, hooks in self.hooks(module, before):
            tables.unsilence(each, hooks)
