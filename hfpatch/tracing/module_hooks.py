"""The hooks on the modules of a model, which pass inputs and outputs to the `Watch` of the current step."""

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
    """A hook whose copy, deep-copied or unpickled with its module, does nothing."""

    def __deepcopy__(self, _memo: Any) -> Hook:
        return Hook(nothing)

    def __reduce__(self) -> Any:
        return (Hook, (nothing,))


class Hook(_Uncopied):
    """A hook that calls a function."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> None:
        """Call the function."""
        self.function(*args)


def nothing(*_: Any) -> None:
    """Do nothing."""


class _Before(_Uncopied):
    """Tells the watch that a module is called."""

    def __init__(self, hooks: Hooks, path: str, keeps: bool, writes: bool) -> None:
        self.hooks, self.path, self.keeps, self.writes = hooks, path, keeps, writes

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pass on the call's arguments."""
        watch = self.hooks.watch
        if watch is not None and not in_transform():
            watch.called(self.path, module, args, kwargs, self.keeps)
            if self.writes:
                watch.measure()


class _After(_Uncopied):
    """Tells the watch what a module returned."""

    def __init__(self, hooks: Hooks, path: str, keeps: bool) -> None:
        self.hooks, self.path, self.keeps = hooks, path, keeps

    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        """Pass on the output."""
        watch = self.hooks.watch
        if watch is not None and not in_transform():
            watch.returned(self.path, output, self.keeps)


def _writes(module: nn.Module) -> bool:
    """True if a module is known to write to its input, as `nn.ReLU(inplace=True)` does, or to hold one that is."""
    return any(m.__dict__.get("inplace") is True for m in module.modules())


class Hooks:
    """The hooks of every watched module except the model itself; they are on the modules only in traced steps.

    Attributes:
        watch: The watch of the current step; None between steps.
    """

    def __init__(self, places: Places, *, inner: bool) -> None:
        self.watch: Watch | None = None
        self._key: int | None = None
        self._made: list[tuple[nn.Module, _Before, _After]] = []
        for listed, keeps in ((places.containers, True), (places.blocks, True), (places.inner if inner else {}, False)):
            for path, module in listed.items():
                if path:
                    before = _Before(self, path, keeps, _writes(module))
                    self._made.append((module, before, _After(self, path, keeps)))

    def set(self) -> None:
        """Set the hooks, unless they are set already."""
        if self._key is not None:
            return
        self._key = hooks.around(self._made)

    def remove(self) -> None:
        """Remove the hooks, if they are set."""
        if self._key is None:
            return
        hooks.drop_around(self._made, self._key)
        self._key = None
