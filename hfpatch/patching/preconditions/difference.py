"""Compares two plans for one model."""

from __future__ import annotations

from itertools import zip_longest

from hfpatch.patching.decision import Decisions
from hfpatch.patching.edits import Edit
from hfpatch.patching.kinds.states import show

Key = tuple[str, str | None]
"""Id of a patch, path of a submodel."""


def difference(was: Decisions, now: Decisions) -> str | None:
    """Return a sentence about the first difference between the edits of two plans; None if they are the same.

    Reasons are not compared, nor are opt-in and refused patches.
    """
    before, after = _done(was), _done(now)
    for key in {**before, **after}:
        if key not in after:
            why = next((f"{d.decided}: {d.reason}" for d in now.decisions if d.patch == key[0]), "not in the plan")
            return f"{key[0]} was to change {_place(before[key][0])}, and is now {why}"
        if key not in before:
            return f"{key[0]} would now change {_place(after[key][0])} too"
        for one, other in zip_longest(before[key], after[key]):
            if (changed := _changed(one, other)) is not None:
                return f"{key[0]}: {changed}"
    return None


def _done(plan: Decisions) -> dict[Key, list[Edit]]:
    found: dict[Key, list[Edit]] = {}
    for decision in plan.of("applied"):
        found.setdefault((decision.patch, decision.submodel), []).extend(decision.edits)
    return found


def _changed(one: Edit | None, other: Edit | None) -> str | None:
    if one is None or other is None:
        return f"{_place(one or other)} would {'now be changed too' if one is None else 'no longer be changed'}"
    if one.path == other.path and one.module is not other.module:
        return f"{one.path or 'the model itself'} is another module now"
    if one != other:
        return f"{_place(one)}: {_change(one)} then, {_place(other)}: {_change(other)} now"
    return None


def _place(edit: Edit | None) -> str:
    return f"{edit.slot} of {edit.path or 'the model itself'}" if edit is not None else "nothing"


def _change(edit: Edit) -> str:
    return f"{show(edit.before)} -> {show(edit.after)}"
