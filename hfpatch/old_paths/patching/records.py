"""Where models pickled with release 0.1 look for these names; records of that time become those of today."""

from __future__ import annotations

from typing import Any

from hfpatch.patching import record
from hfpatch.patching.kinds.base import Change
from hfpatch.patching.kinds.bound_modulation import BoundModulation
from hfpatch.patching.kinds.choose_attention import ChooseAttention
from hfpatch.patching.kinds.set_attribute import SetAttribute
from hfpatch.patching.kinds.set_tensor import SetTensor
from hfpatch.patching.kinds.states import Missing as Missing


class Record:
    """A record that says by words what was done: `kind` and `slot`. Unpickled, it is a record of today."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        change = change_of(state.pop("kind"), state.pop("slot"), state.pop("after"))
        self.__dict__.update(state, change=change)
        self.__class__ = record.Record  # pyright: ignore[reportAttributeAccessIssue] - it is one from here on


def change_of(kind: str, slot: str, after: Any) -> Change:
    """Return what an edit of that kind and slot, to that value, is today."""
    match kind:
        case "attribute":
            return SetAttribute(slot, after)
        case "tensor":
            return SetTensor(slot.removeprefix("tensor "), after)
        case "attention":
            return ChooseAttention(after)
        case "one-plus-tanh":
            return BoundModulation(after)
        case _:  # a hook that casts, or what adapters gain: unpickled, the value is the change already
            return after
