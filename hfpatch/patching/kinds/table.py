"""The closed set of kinds of edit, by name; the plain ones are here, the others have a file each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from hfpatch.compat import hooks
from hfpatch.compat.modules import buffers, parameters
from hfpatch.lora.expand import wrapped
from hfpatch.model.survey import Survey
from hfpatch.patching.kinds.adapter import AdapterTargets
from hfpatch.patching.kinds.attention_choice import AttentionChoice
from hfpatch.patching.kinds.base import Kind
from hfpatch.patching.kinds.casts import CastOutput
from hfpatch.patching.kinds.hook_base import HookKind
from hfpatch.patching.kinds.one_plus_tanh import OnePlusTanh
from hfpatch.patching.records import ABSENT, HERE, Record, State, show


class Attribute(Kind):
    """A module's plain attribute takes another value: written, read and restored in its `__dict__`."""

    def now(self, module: nn.Module, slot: str) -> Any:
        return module.__dict__.get(slot, ABSENT)

    def inverse(self, root: nn.Module, module: nn.Module, slot: str, after: Any) -> Any:
        return self.now(module, slot)

    def write(self, root: nn.Module, module: nn.Module, record: Record) -> None:
        module.__dict__[record.slot] = record.after  # past any setter: a compiled module's would write elsewhere

    def read(self, root: nn.Module, module: nn.Module, record: Record) -> State:
        now = self.now(module, record.slot)
        if _equal(now, record.after):
            return HERE
        if now is ABSENT:
            return State("gone", "not there")
        return State("gone" if _equal(now, record.before) else "changed", show(now))

    def restore(self, root: nn.Module, module: nn.Module, record: Record) -> None:
        if record.before is ABSENT:
            module.__dict__.pop(record.slot, None)
        else:
            module.__dict__[record.slot] = record.before


def _equal(value: Any, other: Any) -> bool:
    """True if two values are the same; a tensor or an array, whose comparison is no bool, equals itself only."""
    if value is other:
        return True
    same = value == other
    return isinstance(same, bool) and same


class Hook(HookKind):
    """A forward hook that casts: `record.after` is the hook itself."""

    def write(self, root: nn.Module, module: nn.Module, record: Record) -> None:
        if isinstance(record.after, CastOutput):
            hooks.after(module, record.after)
        else:
            hooks.before(module, record.after, with_kwargs=True)

    def hooks(self, module: nn.Module, record: Record) -> Iterable[tuple[nn.Module, tuple[Any, ...]]]:
        yield module, (record.after,)


class TensorInPlace(Kind):
    """A parameter's or buffer's values are replaced; the tensor stays the same object.

    `record.after` is a function of the old values, `record.before` the old values. Where the tensor is gone, or has
    another shape since, there is nothing to put them back into, and a revert drops the record.
    """

    trains = True

    def now(self, module: nn.Module, slot: str) -> Any:
        tensor = _tensor(module, slot)
        if tensor is None or tensor.is_meta:
            return ABSENT
        return f"std {float(tensor.detach().float().std(correction=0)):.3g}"

    def inverse(self, root: nn.Module, module: nn.Module, slot: str, after: Any) -> Any:
        tensor = _tensor(module, slot)
        return ABSENT if tensor is None else tensor.detach().clone()

    def write(self, root: nn.Module, module: nn.Module, record: Record) -> None:
        _put(module, record, record.after(record.before))

    def read(self, root: nn.Module, module: nn.Module, record: Record) -> State:
        tensor = _tensor(module, record.slot)
        if tensor is None:
            return State("changed", COMPUTED) if _computed(module, record.slot) else State("gone", "no tensor any more")
        if tensor.shape != record.before.shape:
            return State("gone", f"of shape {tuple(tensor.shape)}")
        return HERE

    def compare(self, root: nn.Module, module: nn.Module, record: Record) -> State:
        state = self.read(root, module, record)
        tensor = _tensor(module, record.slot)
        if tensor is None or state != HERE or _elsewhere(tensor):
            return state
        now = tensor.detach()
        if _holds(now, record.after(record.before)):
            return HERE
        if _holds(now, record.before):
            return State("gone", f"at what it was before the patch ({self.now(module, record.slot)})")
        return State("trained", f"trained or set since ({self.now(module, record.slot)})")

    def obstacle(self, root: nn.Module, module: nn.Module, record: Record) -> str | None:
        tensor = _tensor(module, record.slot)
        outside = wrapped(Survey(root))
        if outside is not None and outside[1] == "FSDP":
            return f"inside FSDP ({outside[0] or 'the model'}), which keeps the values in shards of its own"
        if tensor is None:
            return COMPUTED if _computed(module, record.slot) else None
        return _elsewhere(tensor)

    def restore(self, root: nn.Module, module: nn.Module, record: Record) -> None:
        _put(module, record, record.before)

    def lift(self, root: nn.Module, module: nn.Module, record: Record, held: list[Any]) -> None:
        tensor = _tensor(module, record.slot)
        if tensor is not None:
            held.append(tensor.detach().clone())
        self.restore(root, module, record)

    def lower(self, root: nn.Module, module: nn.Module, record: Record, held: list[Any]) -> None:
        for values in held:
            _put(module, record, values)


def _tensor(module: nn.Module, slot: str) -> torch.Tensor | None:
    name = slot.removeprefix("tensor ")
    found = {**buffers(module), **parameters(module)}.get(name)
    return found if isinstance(found, torch.Tensor) else None


COMPUTED = "computed from other tensors (parametrized, or pruned): take that off, then revert"


def _computed(module: nn.Module, slot: str) -> bool:
    """True if a tensor is no parameter any more, but made of others whenever the module is called."""
    return isinstance(getattr(module, slot.removeprefix("tensor "), None), torch.Tensor)


def _holds(now: torch.Tensor, values: torch.Tensor) -> bool:
    """True if a tensor holds these values, as far as its dtype, or a half precision it was in meanwhile, keeps them."""
    rounded = (values, values.half(), values.bfloat16(), values.bfloat16().half(), values.half().bfloat16())
    return any(torch.equal(now, each.to(now)) for each in rounded)


def _elsewhere(tensor: torch.Tensor) -> str | None:
    """Why a tensor's values are not all here to be compared or written; None where they are."""
    if tensor.is_meta:
        return "on meta: its values are offloaded, or were never loaded"
    if type(tensor.data) is not torch.Tensor:
        return f"a {type(tensor.data).__name__}, whose values are not all here: take the wrapper off that shards it"
    return None


def _put(module: nn.Module, record: Record, values: torch.Tensor) -> None:
    tensor = _tensor(module, record.slot)
    if tensor is None and _computed(module, record.slot):
        raise RuntimeError(f"it is {COMPUTED}")
    if tensor is not None and tensor.shape == values.shape:
        if elsewhere := _elsewhere(tensor):
            raise RuntimeError(f"it is {elsewhere}")
        tensor.detach().copy_(values)  # an interruption as torch.no_grad ends would leave gradients off for good


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "attribute": Attribute(),
        "hook": Hook(),
        "tensor": TensorInPlace(),
        "attention": AttentionChoice(),
        "adapter": AdapterTargets(),
        "one-plus-tanh": OnePlusTanh(),
    }
)
