"""What a kind of edit must be able to do. The engine knows edits only through this.

A kind is a stateless object; what undo needs is in the `Record`, which the edited module carries.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from hfpatch.patching.records import ABSENT, Missing, Record, State

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ABSENT", "Kind", "Missing", "Record"]  # models pickled with release 0.1 name the last two here


class Kind:
    """One kind of edit: how it is read, written, undone.

    `root` is the object the caller works on (of apply, or of revert: a copy has another); `module` is the
    edited module in it.
    """

    unseen: ClassVar[str] = ""
    """Why code that torch.compile has made already would not notice the edit; empty where it does."""

    trains: ClassVar[bool] = False
    """True if training changes what the edit has set: no undoing of it, and nothing that an undo may take away."""

    def now(self, module: nn.Module, slot: str) -> Any:
        """What is there now, for a plan's table; `ABSENT` for nothing."""
        return ABSENT

    def inverse(self, root: nn.Module, module: nn.Module, slot: str, after: Any) -> Any:
        """Everything undo will need. Changes nothing."""
        return ABSENT

    def write(self, root: nn.Module, module: nn.Module, record: Record) -> None:
        """Carry the edit out."""
        raise NotImplementedError

    def read(self, root: nn.Module, module: nn.Module, record: Record) -> State:
        """What has become of a written edit, by a look at the model. Compares no tensors."""
        raise NotImplementedError

    def compare(self, root: nn.Module, module: nn.Module, record: Record) -> State:
        """The same, with a look at the values of tensors."""
        return self.read(root, module, record)

    def restore(self, root: nn.Module, module: nn.Module, record: Record) -> None:
        """Put back what was there, exactly: bytes, identity, order, absence.

        Also after a write or a restore that was interrupted, and a second time.
        """
        raise NotImplementedError

    def obstacle(self, root: nn.Module, module: nn.Module, record: Record) -> str | None:
        """Why undoing the edit would break something, though it is as it was made; None where nothing would."""
        return None

    def lost(self, root: nn.Module, module: nn.Module, record: Record) -> str | None:
        """What an undo throws away that somebody may miss; None for nothing."""
        return None

    def lift(self, root: nn.Module, module: nn.Module, record: Record, held: list[Any]) -> None:
        """Restore for a while. What `lower` will need goes into `held`, before anything is changed."""
        self.restore(root, module, record)

    def lower(self, root: nn.Module, module: nn.Module, record: Record, held: list[Any]) -> None:
        """The way back from `lift`, also from one that was interrupted."""
        self.write(root, module, record)

    def added(self, root: nn.Module, module: nn.Module, record: Record) -> Iterable[nn.Parameter]:
        """Parameters the edit brought into the model."""
        return ()
