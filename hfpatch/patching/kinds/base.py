"""The interface of a change to a module. apply, status and revert use a change only through it.

A change is a frozen value: equal changes do the same. The data that undoing it needs is kept in the `Record` that
the changed module carries.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hfpatch.patching.kinds.states import ABSENT, State

if TYPE_CHECKING:
    from torch import nn


InCheckpoint = Literal["nowhere", "weights", "loader", "adapter"]


PLACES: dict[InCheckpoint, str] = {
    "nowhere": "not saved with the weights: to be applied again",
    "weights": "in the weights",
    "loader": "in no checkpoint, and as from_pretrained(dtype=) leaves it: to be applied again after a cast",
    "adapter": "in the adapter that PEFT saves",
}
"""Where a saved checkpoint has a change -> in words."""


class Change:
    """One change to one module: writes, reads and undoes it.

    In the methods, `root` is the object that apply or revert was called with (a copy of a model is another root),
    `module` is the changed module in it, and `before` is the value that `inverse` returned.
    """

    unseen: ClassVar[str] = ""
    """Why code that torch.compile has already compiled would not notice the change; empty if it would."""
    widens: ClassVar[bool] = False
    """True if what the module and those in it compute gets a wider range, so that an overflow in it is cured."""

    in_checkpoint: ClassVar[InCheckpoint] = "nowhere"
    """Where a saved checkpoint has the change."""

    @property
    def slot(self) -> str:
        """Name of the changed property, for tables: `eps`, `input dtype`, `tensor weight`, `attention`."""
        raise NotImplementedError

    @property
    def after(self) -> Any:
        """The new value, for tables and messages."""
        return self

    @property
    def place(self) -> Hashable:
        """The part of a module that is changed: of two changes with the same place, only one can be in force."""
        return type(self)

    def now(self, module: nn.Module) -> Any:
        """Return the present value, for the table of a plan; `ABSENT` if there is none."""
        return ABSENT

    def inverse(self, root: nn.Module, module: nn.Module) -> Any:
        """Return the data that undoing will need. Changes nothing."""
        return ABSENT

    def write(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        """Make the change."""
        raise NotImplementedError

    def read(self, root: nn.Module, module: nn.Module, before: Any) -> State:
        """Return the present state of the change in the model, without comparing the values of tensors."""
        raise NotImplementedError

    def compare(self, root: nn.Module, module: nn.Module, before: Any) -> State:
        """Return the present state of the change in the model, with the values of tensors compared."""
        return self.read(root, module, before)

    def restore(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        """Restore exactly what was there before: bytes, identity, order, absence.

        Works after an interrupted restore too, and when called twice.
        """
        raise NotImplementedError

    def abandon(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        """Restore after a write that did not finish."""
        self.restore(root, module, before)

    def obstacle(self, root: nn.Module, module: nn.Module, before: Any) -> str | None:
        """Return why undoing would break the model, even though the change is in place; None if it would not."""
        return None

    def lost(self, root: nn.Module, module: nn.Module, before: Any) -> str | None:
        """Return a sentence about what undoing changes besides the edit: training thrown away; None if nothing."""
        return None

    def suspend(self, root: nn.Module, module: nn.Module, before: Any, held: list[Any]) -> None:
        """Undo the change for a while. Appends the data that `resume` will need to `held`, before changing anything."""
        self.restore(root, module, before)

    def resume(self, root: nn.Module, module: nn.Module, before: Any, held: list[Any]) -> None:
        """Put the change back after `suspend`, even if that was interrupted."""
        self.write(root, module, before)

    def added(self, root: nn.Module, module: nn.Module, before: Any) -> Iterable[nn.Parameter]:
        """Return the parameters that the change added to the model."""
        return ()
