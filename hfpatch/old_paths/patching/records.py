"""Names that models pickled with release 0.1 refer to. Unpickling converts their records to the present class."""

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
    """A record of release 0.1, with `kind` and `slot` in place of `change`. Unpickling makes it a `record.Record`."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        change = change_of(state.pop("kind"), state.pop("slot"), state.pop("after"))
        self.__dict__.update(state, change=change)
        self.__class__ = record.Record  # pyright: ignore[reportAttributeAccessIssue] - converted on purpose


def change_of(kind: str, slot: str, after: Any) -> Change:
    """Return the change that corresponds to a kind, slot and value of release 0.1."""
    match kind:
        case "attribute":
            return SetAttribute(slot, after)
        case "tensor":
            return SetTensor(slot.removeprefix("tensor "), after)
        case "attention":
            return ChooseAttention(after)
        case "one-plus-tanh":
            return BoundModulation(after)
        case _:  # casts, and layers that adapters gain: the unpickled value is already the change
            return after
