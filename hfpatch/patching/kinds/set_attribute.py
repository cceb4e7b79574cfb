"""A change that sets a plain attribute of a module."""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hfpatch.patching.kinds.base import Change
from hfpatch.patching.kinds.states import ABSENT, HERE, State, show

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class SetAttribute(Change):
    """Sets a plain attribute of a module, in its `__dict__`."""

    name: str
    value: Any

    @property
    def slot(self) -> str:
        return self.name

    @property
    def after(self) -> Any:
        return self.value

    @property
    def place(self) -> Hashable:
        return SetAttribute, self.name

    def now(self, module: nn.Module) -> Any:
        return module.__dict__.get(self.name, ABSENT)

    def inverse(self, root: nn.Module, module: nn.Module) -> Any:
        return self.now(module)

    def write(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        module.__dict__[self.name] = self.value  # not by setattr: a compiled module would set it on another module

    def read(self, root: nn.Module, module: nn.Module, before: Any) -> State:
        now = self.now(module)
        if _equal(now, self.value):
            return HERE
        if now is ABSENT:
            return State("gone", "not there")
        return State("gone" if _equal(now, before) else "changed", show(now))

    def restore(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        if before is ABSENT:
            module.__dict__.pop(self.name, None)
        else:
            module.__dict__[self.name] = before


def settable(module: nn.Module, name: str) -> bool:
    """False for a property or another data descriptor of the module's class, which cannot be set and restored."""
    return not hasattr(inspect.getattr_static(type(module), name, None), "__set__")


def _equal(value: Any, other: Any) -> bool:
    """True if two values are equal. A tensor or an array, whose comparison is not a bool, equals only itself."""
    if value is other:
        return True
    same = value == other
    return isinstance(same, bool) and same
