"""What a change to a module must be able to do. The engine knows edits only through this.

A change is a frozen value: two that are equal do the same. What undoing one needs is kept beside it, in the `Record`
that the changed module carries.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from hfpatch.patching.kinds.states import ABSENT, State

if TYPE_CHECKING:
    from torch import nn


class Change:
    """One change to one module: how it is written, read and undone.

    `root` is the object the caller works on (of apply, or of revert: a copy has another); `module` is the module in it
    that is changed; `before` is what `inverse` returned.
    """

    unseen: ClassVar[str] = ""
    """Why code that torch.compile has made already would not notice the change; empty where it does."""

    @property
    def slot(self) -> str:
        """Name of what is changed, for tables and sentences: `eps`, `input dtype`, `tensor weight`, `attention`."""
        raise NotImplementedError

    @property
    def after(self) -> Any:
        """The value asked for, for tables and sentences."""
        return self

    @property
    def place(self) -> Hashable:
        """What of a module is changed: of two changes with one place, only one can be in force."""
        return type(self)

    def now(self, module: nn.Module) -> Any:
        """Return the value that is there now, for a plan's table; `ABSENT` for nothing."""
        return ABSENT

    def inverse(self, root: nn.Module, module: nn.Module) -> Any:
        """Return everything undo will need. Changes nothing."""
        return ABSENT

    def write(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        """Carry it out."""
        raise NotImplementedError

    def read(self, root: nn.Module, module: nn.Module, before: Any) -> State:
        """Return what has become of it since it was written, by a look at the model. Compares no tensors."""
        raise NotImplementedError

    def compare(self, root: nn.Module, module: nn.Module, before: Any) -> State:
        """Return the same, with a look at the values of tensors."""
        return self.read(root, module, before)

    def restore(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        """Put back what was there, exactly: bytes, identity, order, absence.

        Also after a restore that was interrupted, and a second time.
        """
        raise NotImplementedError

    def abandon(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        """Restore after a write that did not come to its end."""
        self.restore(root, module, before)

    def obstacle(self, root: nn.Module, module: nn.Module, before: Any) -> str | None:
        """Return why undoing would break something, though all is as it was made; None where nothing would."""
        return None

    def lost(self, root: nn.Module, module: nn.Module, before: Any) -> str | None:
        """Return what undoing throws away that somebody may miss; None for nothing."""
        return None

    def lift(self, root: nn.Module, module: nn.Module, before: Any, held: list[Any]) -> None:
        """Restore for a while. What `lower` will need goes into `held`, before anything is changed."""
        self.restore(root, module, before)

    def lower(self, root: nn.Module, module: nn.Module, before: Any, held: list[Any]) -> None:
        """The way back from `lift`, also from one that was interrupted."""
        self.write(root, module, before)

    def added(self, root: nn.Module, module: nn.Module, before: Any) -> Iterable[nn.Parameter]:
        """Return the parameters it brought into the model."""
        return ()
