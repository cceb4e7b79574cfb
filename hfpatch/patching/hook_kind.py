# hooks are found and taken off by identity, which torch's handles cannot do on a deepcopy
# pyright: reportPrivateUsage=false
"""What the kinds of edit that set forward hooks have in common: how hooks are taken off, and put back in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from hfpatch.patching.kind import Kind, Record


class HookKind(Kind):
    """A kind of edit that sets forward hooks. They are found again by identity; only ours go."""

    unseen = "torch.compile would go on running the code it made without the hooks"

    def hooks(self, module: nn.Module, record: Record) -> Iterable[tuple[nn.Module, tuple[Any, ...]]]:
        """The modules that hooks were set on, each with its hooks."""
        raise NotImplementedError

    def restore(self, root: nn.Module, module: nn.Module, record: Record) -> None:
        for each, hooks in self.hooks(module, record):
            tables = _tables(each)
            for key in [k for table in tables for k, set_ in table.items() if any(set_ is hook for hook in hooks)]:
                for table in tables:
                    table.pop(key, None)

    def lift(self, root: nn.Module, module: nn.Module, record: Record) -> Any:
        held = [(table, dict(table)) for each, _ in self.hooks(module, record) for table in _tables(each)]
        self.restore(root, module, record)
        return held

    def lower(self, root: nn.Module, module: nn.Module, record: Record, held: Any) -> None:
        for table, was in held:  # all of them, in the order they had
            table.clear()
            table.update(was)


def _tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Hooks before and after forward, and how each is called: all by one key, which no two hooks share."""
    return (
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    )
