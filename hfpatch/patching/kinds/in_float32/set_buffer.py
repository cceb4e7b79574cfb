"""A change that replaces a buffer with a tensor of other values and another dtype."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.compat.modules import buffers
from hfpatch.dtypes import dtype_name
from hfpatch.model.rebuilt import holds, is_rounding_of
from hfpatch.patching.kinds.base import Change
from hfpatch.patching.kinds.set_tensor import SetTensor
from hfpatch.patching.kinds.states import ABSENT, HERE, State


@dataclass(frozen=True, eq=False)
class Values:
    """A tensor on the CPU. Equal if dtype, shape and every value are."""

    tensor: torch.Tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Values):
            return NotImplemented
        mine, theirs = self.tensor, other.tensor
        return mine.dtype == theirs.dtype and mine.shape == theirs.shape and torch.equal(mine, theirs)

    def __hash__(self) -> int:
        return hash((self.tensor.dtype, self.tensor.shape))

    def __str__(self) -> str:
        return dtype_name(self.tensor.dtype)


@dataclass(frozen=True)
class SetBuffer(Change):
    """Replaces a buffer with another tensor, on the device of the one that was there; its name stays in its place.

    `before` is the tensor that was there, so undoing restores the same object. A later `.half()` or `.to(dtype)`
    rounds the new tensor too: the edit is then *gone*, and undoing it gives the old values in the dtype of that cast.

    Attributes:
        name: The buffer's name in its module.
        values: The tensor to put there.
    """

    in_checkpoint = "loader"

    name: str
    values: Values

    @property
    def slot(self) -> str:
        return f"buffer {self.name}"

    @property
    def after(self) -> Any:
        return self.values

    @property
    def place(self) -> Hashable:
        return SetTensor, self.name  # a patch that sets the values of this tensor changes the same place

    def now(self, module: nn.Module) -> Any:
        buffer = buffers(module).get(self.name)
        return ABSENT if buffer is None else dtype_name(buffer.dtype)

    def inverse(self, root: nn.Module, module: nn.Module) -> Any:
        buffer = buffers(module).get(self.name)
        return ABSENT if buffer is None else buffer

    def write(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        device = before.device if isinstance(before, torch.Tensor) else self.values.tensor.device
        buffers(module)[self.name] = self.values.tensor.to(device, copy=True)

    def read(self, root: nn.Module, module: nn.Module, before: Any) -> State:
        buffer = buffers(module).get(self.name)
        if buffer is None:
            return State("gone", "not there")
        if buffer.is_meta:
            return HERE if buffer.dtype == self.values.tensor.dtype else State("gone", f"{dtype_name(buffer.dtype)}")
        exact = self.values.tensor
        if holds(buffer, exact):
            return HERE
        if is_rounding_of(buffer, exact):
            return State("gone", f"rounded again, and {dtype_name(buffer.dtype)} now")
        return State("changed", f"at other values, in {dtype_name(buffer.dtype)}")

    def restore(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        now = buffers(module).get(self.name)
        if not isinstance(before, torch.Tensor):
            buffers(module).pop(self.name, None)
        elif now is None or now is before:
            buffers(module)[self.name] = before
        else:
            cast = now.dtype != self.values.tensor.dtype
            buffers(module)[self.name] = before.to(now.device, now.dtype if cast else before.dtype)

    def suspend(self, root: nn.Module, module: nn.Module, before: Any, held: list[Any]) -> None:
        held.append(buffers(module).get(self.name))
        self.restore(root, module, before)

    def resume(self, root: nn.Module, module: nn.Module, before: Any, held: list[Any]) -> None:
        for tensor in held:
            buffers(module)[self.name] = tensor
