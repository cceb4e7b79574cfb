"""The steps, epochs and ranks that a user chooses."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from hfpatch.errors import InputError
from hfpatch.given import FUNCTION, shown, want

Chosen = Collection[int] | Callable[[int], bool] | None


def chosen(name: str, wanted: Chosen) -> Callable[[int], bool]:
    """Return the function that is True of the chosen numbers; its `last`, if it has one, is the largest.

    Raises:
        InputError: They are neither numbers nor a function.
    """
    if wanted is None:
        return lambda _: True
    if callable(wanted):
        want("trace", **{name: (wanted, FUNCTION)})
        return wanted
    return _Numbers(listed(name, wanted))


def listed(name: str, wanted: Any) -> Collection[int]:
    """Return numbers that the user listed, checked."""
    try:
        several = isinstance(wanted, Collection) and not isinstance(wanted, (str, bytes))
        fits = several and all(type(n) is int and n >= 0 for n in wanted)
    except TypeError:  # a tensor of no dimension is a collection that cannot be gone through
        fits = False
    if not fits:
        raise InputError(f"trace: {name}=: want a list of integers from 0 up, or None for all; got {shown(wanted)}")
    return wanted


class _Numbers:
    """The listed numbers; `last` is the largest."""

    def __init__(self, numbers: Collection[int]) -> None:
        self.numbers = frozenset(numbers)
        self.last = max(numbers, default=-1)

    def __call__(self, number: int) -> bool:
        return number in self.numbers


def last_of(wanted: object) -> int | None:
    """Return the largest number that was listed; None for a function of the user's own."""
    return wanted.last if isinstance(wanted, _Numbers) else None
