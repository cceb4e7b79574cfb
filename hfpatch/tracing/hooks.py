"""The hooks on the modules of a model, which hand what they see to the watch of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from hfpatch.tracing.places import Places

if TYPE_CHECKING:
    from hfpatch.tracing.watch import Watch


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
            if self.watch is not None:
                self.watch.called(path, module, args, kwargs, keeps)

        def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            if self.watch is not None:
                self.watch.returned(path, output, keeps)

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after))

    def remove(self) -> None:
        """Take them off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
