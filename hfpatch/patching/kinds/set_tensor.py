"""A change that replaces the values of a parameter or buffer in place."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.compat.modules import buffers, parameters
from hfpatch.lora.expand import wrapped
from hfpatch.model.survey import Survey
from hfpatch.patching.kinds.base import Change
from hfpatch.patching.kinds.states import ABSENT, HERE, State

COMPUTED = "computed from other tensors (parametrized, or pruned): remove that first, then revert"


@dataclass(frozen=True)
class SetTensor(Change):
    """Replaces the values of a parameter or buffer; the tensor stays the same object.

    `before` holds the old values. If the tensor is gone or has another shape now, they cannot be restored, and a revert
    only drops the record.

    Attributes:
        name: The tensor's name in its module.
        values: A picklable, comparable function of the old values to new ones of the same shape.
    """

    in_checkpoint = "weights"

    name: str
    values: Callable[[torch.Tensor], torch.Tensor]

    @property
    def slot(self) -> str:
        return f"tensor {self.name}"

    @property
    def after(self) -> Any:
        return self.values

    @property
    def place(self) -> Hashable:
        return SetTensor, self.name

    def now(self, module: nn.Module) -> Any:
        tensor = self._tensor(module)
        if tensor is None or tensor.is_meta:
            return ABSENT
        return f"std {float(tensor.detach().float().std(correction=0)):.3g}"

    def inverse(self, root: nn.Module, module: nn.Module) -> Any:
        tensor = self._tensor(module)
        return ABSENT if tensor is None else tensor.detach().clone()

    def write(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        self._put(module, self.values(before))

    def read(self, root: nn.Module, module: nn.Module, before: Any) -> State:
        tensor = self._tensor(module)
        if tensor is None:
            return State("changed", COMPUTED) if self._computed(module) else State("gone", "no longer a tensor")
        if tensor.shape != before.shape:
            return State("gone", f"of shape {tuple(tensor.shape)}")
        return HERE

    def compare(self, root: nn.Module, module: nn.Module, before: Any) -> State:
        state = self.read(root, module, before)
        tensor = self._tensor(module)
        if tensor is None or state != HERE or _elsewhere(tensor):
            return state
        now = tensor.detach()
        if _holds(now, self.values(before)):
            return HERE
        if _holds(now, before):
            return State("gone", f"as before the patch ({self.now(module)})")
        return State("trained", f"trained or set since ({self.now(module)})")

    def obstacle(self, root: nn.Module, module: nn.Module, before: Any) -> str | None:
        tensor = self._tensor(module)
        outside = wrapped(Survey(root))
        if outside is not None and outside[1] == "FSDP":
            return f"inside FSDP ({outside[0] or 'the model'}), which keeps the values in shards of its own"
        if tensor is None:
            return COMPUTED if self._computed(module) else None
        return _elsewhere(tensor)

    def lost(self, root: nn.Module, module: nn.Module, before: Any) -> str | None:
        return shared(self.name, self._tensor(module))

    def restore(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        self._put(module, before)

    def suspend(self, root: nn.Module, module: nn.Module, before: Any, held: list[Any]) -> None:
        tensor = self._tensor(module)
        if tensor is not None:
            held.append(tensor.detach().clone())
        self.restore(root, module, before)

    def resume(self, root: nn.Module, module: nn.Module, before: Any, held: list[Any]) -> None:
        for values in held:
            self._put(module, values)

    def _tensor(self, module: nn.Module) -> torch.Tensor | None:
        found = {**buffers(module), **parameters(module)}.get(self.name)
        return found if isinstance(found, torch.Tensor) else None

    def _computed(self, module: nn.Module) -> bool:
        """True if the tensor is no longer a parameter, but computed from others at each call of the module."""
        return isinstance(getattr(module, self.name, None), torch.Tensor)

    def _put(self, module: nn.Module, values: torch.Tensor) -> None:
        tensor = self._tensor(module)
        if tensor is None and self._computed(module):
            raise RuntimeError(f"it is {COMPUTED}")
        if tensor is not None and tensor.shape == values.shape:
            if elsewhere := _elsewhere(tensor):
                raise RuntimeError(f"it is {elsewhere}")
            tensor.detach().copy_(values)  # no torch.no_grad: an interruption at its end would leave gradients disabled


def _holds(now: torch.Tensor, values: torch.Tensor) -> bool:
    """True if a tensor holds these values, rounded to its dtype or through a half precision that it had meanwhile."""
    rounded = (values, values.half(), values.bfloat16(), values.bfloat16().half(), values.half().bfloat16())
    return any(torch.equal(now, each.to(now)) for each in rounded)


def shared(name: str, tensor: torch.Tensor | None) -> str | None:
    """Return a sentence if other processes have the memory of a tensor too; None if not, or if torch cannot tell."""
    if tensor is None or tensor.device.type != "cpu" or not tensor.is_shared():  # on a GPU it says so of every tensor
        return None
    return f"the memory of {name} is shared, so other processes that have this model have the old values now too"


def _elsewhere(tensor: torch.Tensor) -> str | None:
    """Return why the values of a tensor cannot be compared or written in this process; None if they can."""
    if tensor.is_meta:
        return "on meta: its values are offloaded or not loaded"
    if type(tensor.data) is not torch.Tensor:
        return f"a {type(tensor.data).__name__}, whose values are sharded: remove the wrapper that shards it first"
    return None
