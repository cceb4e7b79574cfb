"""The states of an edit, and its values as text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

Word = Literal["here", "gone", "changed", "trained", "unfinished"]


class Missing(Enum):
    """The type of `ABSENT`, which means that there was no value; an enum member survives copies and pickles."""

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
    """The present state of an edit.

    Attributes:
        word: `here`: in place. `gone`: no longer in place. `changed`: another value was set since. `trained`: a tensor
            has other values than the patch gave it. `unfinished`: half made or half undone, because of an
            interruption; the next revert undoes it.
        now: The present value, to complete the sentence "eps of ln_speech is ..."; empty for `here`.
    """

    word: Word
    now: str = ""

    @property
    def in_force(self) -> bool:
        """True if the edit has its effect: it is in place, trained or not."""
        return self.word in ("here", "trained")


HERE = State("here")
UNFINISHED = State("unfinished", "half made or half undone")
