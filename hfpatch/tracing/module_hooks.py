"""The hooks on the modules of a model, which hand what they see to the watch of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from hfpatch.compat import hooks
from hfpatch.compat.autograd import in_transform
from hfpatch.tracing.watched import Places

if TYPE_CHECKING:
    from hfpatch.tracing.watch import Watch


class _Uncopied:
    """A copy of it, deep-copied or unpickled with its module, is a hook that does nothing."""

    def __deepcopy__(self, _memo: Any) -> Hook:
        return Hook(nothing)

    def __reduce__(self) -> Any:
        return (Hook, (nothing,))


class Hook(_Uncopied):
    """A hook that calls a function."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> None:
        """Be a hook."""
        self.function(*args)


def nothing(*_: Any) -> None:
    """Do nothing."""


class _Before(_Uncopied):
    """Tells that a module is called."""

    def __init__(self, hooks: Hooks, path: str, keeps: bool) -> None:
        self.hooks, self.path, self.keeps = hooks, path, keeps

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Be a hook."""
        watch = self.hooks.watch
        if watch is not None and not in_transform():
            watch.called(self.path, module, args, kwargs, self.keeps)


class _After(_Uncopied):
    """Tells what a module returned."""

    def __init__(self, hooks: Hooks, path: str, keeps: bool) -> None:
        self.hooks, self.path, self.keeps = hooks, path, keeps

    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        """Be a hook."""
        watch = self.hooks.watch
        if watch is not None and not in_transform():
            watch.returned(self.path, output, self.keeps)


class Hooks:
    """For every watched module but the model itself; set for the steps that are traced, and removed.

    Attributes:
        watch: Of the step that runs; None between steps.
    """

    def __init__(self, places: Places, *, inner: bool) -> None:
        self.watch: Watch | None = None
        self._key: int | None = None
        self._made: list[tuple[nn.Module, _Before, _After]] = []
        for listed, keeps in ((places.opened, True), (places.blocks, True), (places.inner if inner else {}, False)):
            for path, module in listed.items():
                if path:
                    self._made.append((module, _Before(self, path, keeps), _After(self, path, keeps)))

    def set(self) -> None:
        """Set them, if they are not."""
        if self._key is not None:
            return
        self._key = hooks.around(self._made)

    def remove(self) -> None:
        """Take them off."""
        if self._key is None:
            return
        hooks.drop_around(self._made, self._key)
        self._key = None
