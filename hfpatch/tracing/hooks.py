"""The hooks on the modules of a model, which hand what they see to the watch of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hfpatch.tracing.places import Places

if TYPE_CHECKING:
    from hfpatch.tracing.watch import Watch


class Hook:
    """A hook that does nothing on a copy of its module, deep-copied or unpickled."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> None:
        """Be a hook."""
        self.function(*args)

    def __deepcopy__(self, _memo: Any) -> Hook:
        return Hook(nothing)

    def __reduce__(self) -> Any:
        return (Hook, (nothing,))


def nothing(*_: Any) -> None:
    """Do nothing."""


def transformed() -> bool:
    """Whether this runs inside a transformation of `torch.func`, where a tensor stands for many and holds no values."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore


class Hooks:
    """Set on every watched module but the model itself, until they are removed.

    Attributes:
        watch: Of the step that runs; None between steps.
    """

    def __init__(self, places: Places, *, inner: bool) -> None:
        self.watch: Watch | None = None
        self._handles: list[RemovableHandle] = []
        for listed, keeps in ((places.opened, True), (places.blocks, True), (places.inner if inner else {}, False)):
            for path, module in listed.items():
                if path:
                    self._set(path, module, keeps)

    def _set(self, path: str, module: nn.Module, keeps: bool) -> None:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.watch is not None and not transformed():
                self.watch.called(path, module, args, kwargs, keeps)

        def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            if self.watch is not None and not transformed():
                self.watch.returned(path, output, keeps)

        self._handles.append(module.register_forward_pre_hook(Hook(before), with_kwargs=True))
        self._handles.append(module.register_forward_hook(Hook(after)))

    def remove(self) -> None:
        """Take them off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
