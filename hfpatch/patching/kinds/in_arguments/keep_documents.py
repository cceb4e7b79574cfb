"""A change by which a language model keeps the documents of a packed row apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from hfpatch.compat import hooks
from hfpatch.numerics.documents import kept_apart
from hfpatch.patching.kinds.hook_change import HookChange


@dataclass(frozen=True)
class KeepDocuments(HookChange):
    """A forward pre-hook on a language model that changes the arguments of a call with packed rows.

    Attributes:
        masked: True to pass masks; False to leave the cache out, so that the model makes them from the positions.
    """

    masked: bool

    @property
    def slot(self) -> str:
        return "packed documents"

    def write(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        hooks.before(module, self, with_kwargs=True)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, Any] | None:
        """Return the arguments with the documents kept apart; None where nothing is packed."""
        if kwargs is None:  # the hook was removed during this call
            return None
        now = kept_apart(module, kwargs, masked=self.masked)
        return None if now is None else (args, now)

    def __str__(self) -> str:
        return "apart, by a mask" if self.masked else "apart, without a cache"
