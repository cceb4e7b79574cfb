"""The closed set of kinds of edit, by name; the plain ones are here, the others have a file each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from hfpatch.patching.adapters import AdapterTargets
from hfpatch.patching.attention import AttentionChoice
from hfpatch.patching.functions import OnePlusTanh
from hfpatch.patching.hook_kind import HookKind
from hfpatch.patching.kind import ABSENT, Kind, Record


class Attribute(Kind):
    """A module's plain attribute takes another value."""

    def now(self, module: nn.Module, slot: str) -> Any:
        return module.__dict__.get(slot, ABSENT)

    def inverse(self, root: nn.Module, module: nn.Module, slot: str, after: Any) -> Any:
        return self.now(module, slot)

    def write(self, root: nn.Module, module: nn.Module, record: Record) -> None:
        setattr(module, record.slot, record.after)

    def restore(self, root: nn.Module, module: nn.Module, record: Record) -> None:
        if record.before is ABSENT:
            module.__dict__.pop(record.slot, None)
        else:
            module.__dict__[record.slot] = record.before  # past any setter: this was its value

    def changed(self, root: nn.Module, module: nn.Module, record: Record) -> str | None:
        now = module.__dict__.get(record.slot, ABSENT)
        return None if now == record.after else str(now)


class Hook(HookKind):
    """A forward hook that casts: `record.after` is the hook itself."""

    def write(self, root: nn.Module, module: nn.Module, record: Record) -> None:
        if record.slot.startswith("input"):
            module.register_forward_pre_hook(record.after, with_kwargs=True)
        else:
            module.register_forward_hook(record.after)

    def hooks(self, module: nn.Module, record: Record) -> Iterable[tuple[nn.Module, tuple[Any, ...]]]:
        yield module, (record.after,)


class TensorInPlace(Kind):
    """A parameter's or buffer's values are replaced; the tensor stays the same object.

    `record.after` is a function of the old values, `record.before` the old values. Where the tensor is gone, or has
    another shape since, there is nothing to put them back into: undone by name, the record is dropped.
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

    def restore(self, root: nn.Module, module: nn.Module, record: Record) -> None:
        _put(module, record, record.before)

    def changed(self, root: nn.Module, module: nn.Module, record: Record) -> str | None:
        tensor = _tensor(module, record.slot)
        if tensor is None:
            return "gone"
        if tensor.shape != record.before.shape:
            return f"of shape {tuple(tensor.shape)}"
        now = tensor.detach()
        as_set = record.after(record.before).to(now)
        return None if torch.equal(now, as_set) else f"trained or set since ({self.now(module, record.slot)})"

    def lift(self, root: nn.Module, module: nn.Module, record: Record) -> Any:
        tensor = _tensor(module, record.slot)
        held = None if tensor is None else tensor.detach().clone()
        self.restore(root, module, record)
        return held

    def lower(self, root: nn.Module, module: nn.Module, record: Record, held: Any) -> None:
        if held is not None:
            _put(module, record, held)


def _tensor(module: nn.Module, slot: str) -> torch.Tensor | None:
    found = getattr(module, slot.removeprefix("tensor "), None)
    return found if isinstance(found, torch.Tensor) else None


def _put(module: nn.Module, record: Record, values: torch.Tensor) -> None:
    tensor = _tensor(module, record.slot)
    if tensor is not None and tensor.shape == values.shape:
        with torch.no_grad():
            tensor.copy_(values)


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
