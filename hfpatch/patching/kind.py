"""What a kind of edit must be able to do. The engine knows edits only through this.

A kind is a stateless object; what undo needs is in the `Record`, which the edited module carries. So a
deepcopy or an unpickled model, whose records were copied with it, can be asked and reverted on its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import nn


class Missing(Enum):
    """Stands for "there was nothing"; an enum member stays itself through copies and pickles."""

    ABSENT = "absent"


ABSENT = Missing.ABSENT


@dataclass(frozen=True)
class Record:
    """An undo-log entry: which patch of which application made an edit, and what undo needs.

    Attributes:
        kind: Name of the kind of edit.
        slot: What of the module is changed.
        before: The inverse: what the kind needs to put things back.
        after: The value asked for, comparable and picklable.
    """

    application: str
    patch: str
    kind: str
    slot: str
    before: Any
    after: Any


class Kind:
    """One kind of edit: how it is read, written, undone.

    `root` is the object the caller works on (of apply, or of revert: a copy has another); `module` is the
    edited module in it.
    """

    unseen: ClassVar[str] = ""
    """Why code that torch.compile has made already would not notice the edit; empty where it does."""

    trains: ClassVar[bool] = False
    """Whether training changes what the edit has set: no undoing of it, and nothing that an undo may take away."""

    def now(self, module: nn.Module, slot: str) -> Any:
        """What is there now, for a plan's table; `ABSENT` for nothing."""
        return ABSENT

    def inverse(self, root: nn.Module, module: nn.Module, slot: str, after: Any) -> Any:
        """Everything undo will need. Changes nothing."""
        return ABSENT

    def write(self, root: nn.Module, module: nn.Module, record: Record) -> None:
        """Carry the edit out."""
        raise NotImplementedError

    def restore(self, root: nn.Module, module: nn.Module, record: Record) -> None:
        """Put back what was there, exactly: bytes, identity, order, absence. Also after a half-done write."""
        raise NotImplementedError

    def changed(self, root: nn.Module, module: nn.Module, record: Record) -> str | None:
        """What somebody else made of the slot since; None where it is as we left it."""
        return None

    def lost(self, root: nn.Module, module: nn.Module, record: Record) -> str | None:
        """What an undo throws away that somebody may miss; None for nothing."""
        return None

    def lift(self, root: nn.Module, module: nn.Module, record: Record) -> Any:
        """Restore for a while; returns what `lower` needs."""
        self.restore(root, module, record)
        return None

    def lower(self, root: nn.Module, module: nn.Module, record: Record, held: Any) -> None:
        """The way back from `lift`."""
        self.write(root, module, record)

    def added(self, root: nn.Module, module: nn.Module, record: Record) -> Iterable[nn.Parameter]:
        """Parameters the edit brought into the model."""
        return ()
