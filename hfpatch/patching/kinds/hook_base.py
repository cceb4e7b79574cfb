"""What the kinds of edit that set forward hooks have in common: hooks are found, taken off, put back in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from hfpatch.compat import hooks as tables
from hfpatch.patching.kinds.base import Kind, Record
from hfpatch.patching.records import HERE, State


class HookKind(Kind):
    """A kind of edit that sets forward hooks. They are found again by identity, also on a copy; only ours go."""

    unseen = "torch.compile would go on running the code it made without the hooks"

    def hooks(self, module: nn.Module, record: Record) -> Iterable[tuple[nn.Module, tuple[Any, ...]]]:
        """The modules that hooks were set on, each with its hooks."""
        raise NotImplementedError

    def read(self, root: nn.Module, module: nn.Module, record: Record) -> State:
        wanted = [(each, hook) for each, hooks in self.hooks(module, record) for hook in hooks]
        missing = sum(not tables.is_set(each, hook) for each, hook in wanted)
        if not missing:
            return HERE
        return State("gone", "without its hook" if len(wanted) == 1 else f"without {missing} of {len(wanted)} hooks")

    def restore(self, root: nn.Module, module: nn.Module, record: Record) -> None:
        for each, hooks in self.hooks(module, record):
            tables.drop(each, [*tables.keys(each, hooks, silent=True), *tables.orphans(each)])

    def lift(self, root: nn.Module, module: nn.Module, record: Record, held: list[Any]) -> None:
        for each, hooks in self.hooks(module, record):
            tables.silence(each, hooks)

    def lower(self, root: nn.Module, module: nn.Module, record: Record, held: list[Any]) -> None:
        for each, hooks in self.hooks(module, record):
            tables.unsilence(each, hooks)
