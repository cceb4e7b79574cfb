"""Two plans for one model: the first thing that would be done otherwise."""

from __future__ import annotations

from itertools import zip_longest

from hfpatch.patching.decision import Decisions
from hfpatch.patching.edits import Edit
from hfpatch.patching.kinds.states import show

Key = tuple[str, str | None]
"""Id of a patch, path of a submodel."""


def difference(was: Decisions, now: Decisions) -> str | None:
    """Return the first thing that another plan would do otherwise, in words; None if both do the same.

    What is not carried out is not compared: reasons, and opt-in or refused patches.
    """
    before, after = _done(was), _done(now)
    for key in {**before, **after}:
        if key not in after:
            why = next((f"{d.decided}: {d.reason}" for d in now.decisions if d.patch == key[0]), "not decided")
            return f"{_place(before[key][0])} was to be changed by {key[0]}, which is now {why}"
        if key not in before:
            return f"{key[0]} would now change {_place(after[key][0])} as well"
        for one, other in zip_longest(before[key], after[key]):
            if (told := _otherwise(one, other)) is not None:
                return f"{key[0]}: {told}"
    return None


def _done(plan: Decisions) -> dict[Key, list[Edit]]:
    found: dict[Key, list[Edit]] = {}
    for decision in plan.of("applied"):
        found.setdefault((decision.patch, decision.submodel), []).extend(decision.edits)
    return found


def _otherwise(one: Edit | None, other: Edit | None) -> str | None:
    if one is None or other is None:
        return f"{_place(one or other)} is to be changed {'now and was not then' if one is None else 'no more'}"
    if one.path == other.path and one.module is not other.module:
        return f"{one.path or 'the model itself'} is another module now"
    if one != other:
        return f"{_place(one)}: {_change(one)} then, {_place(other)}: {_change(other)} now"
    return None


def _place(edit: Edit | None) -> str:
    return f"{edit.slot} of {edit.path or 'the model itself'}" if edit is not None else "nothing"


def _change(edit: Edit) -> str:
    return f"{show(edit.before)} -> {show(edit.after)}"
