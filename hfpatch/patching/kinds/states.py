"""What can be in the place of an edit: a value before it, and what has become of it since."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

Word = Literal["here", "gone", "changed", "trained", "unfinished"]


class Missing(Enum):
    """Stands for "there was nothing"; an enum member stays itself through copies and pickles."""

    ABSENT = "absent"


ABSENT = Missing.ABSENT


def show(value: object) -> str:
    """Return a value of an edit as a table cell."""
    if value is ABSENT:
        return "-"
    if isinstance(value, (int, float, str, bool)):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return str(value) if type(value).__str__ is not object.__str__ else type(value).__name__


@dataclass(frozen=True)
class State:
    """What has become of an edit.

    Attributes:
        word: `here`: as it was made. `gone`: what it made is not there any more. `changed`: somebody set something
            else. `trained`: a tensor has other values than it was given. `unfinished`: an interruption left it half
            made or half undone; the next revert cleans it.
        now: The value that is there instead, to complete "eps of ln_speech is ...".
    """

    word: Word
    now: str = ""

    @property
    def in_force(self) -> bool:
        """True if the patch does what it was applied for."""
        return self.word in ("here", "trained")


HERE = State("here")
UNFINISHED = State("unfinished", "half made or half undone")
