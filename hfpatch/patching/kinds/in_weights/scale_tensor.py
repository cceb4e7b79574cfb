"""A change that multiplies a parameter by a power of two, in place."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.compat.modules import parameters
from hfpatch.patching.kinds.base import Change
from hfpatch.patching.kinds.set_tensor import SetTensor, shared
from hfpatch.patching.kinds.states import ABSENT, HERE, State


@dataclass(frozen=True)
class Largest:
    """The largest entry of a tensor, by which a multiplication is recognised: its place in the flat tensor, its value.

    It is the largest, so that no power of two makes it 0.
    """

    at: int
    value: float


@dataclass(frozen=True)
class ScaleTensor(Change):
    """Multiplies a parameter by a power of two. Undoing it divides, which is exact: only exponents change.

    The old values are not kept. Weights that were trained since are divided too, so a module that reads them with the
    other factor computes the same.

    Attributes:
        name: The parameter's name in its module.
        exponent: Of 2.
    """

    in_checkpoint = "weights"

    name: str
    exponent: int

    @property
    def slot(self) -> str:
        return f"tensor {self.name}"

    @property
    def after(self) -> str:
        return f"x {2**self.exponent}"

    @property
    def place(self) -> Hashable:
        return SetTensor, self.name  # a patch that sets the values of this tensor changes the same place

    def now(self, module: nn.Module) -> Any:
        return ABSENT if parameters(module).get(self.name) is None else "x 1"

    def inverse(self, root: nn.Module, module: nn.Module) -> Any:
        tensor = parameters(module).get(self.name)
        if tensor is None or tensor.is_meta:
            return ABSENT
        at = int(tensor.detach().abs().flatten().argmax())
        return Largest(at, _entry(tensor, at))

    def write(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        tensor = parameters(module)[self.name]
        if tensor is None or before is ABSENT:
            raise ValueError(f"{self.name} is not there, or on meta")
        tensor.detach().mul_(2.0**self.exponent)

    def read(self, root: nn.Module, module: nn.Module, before: Any) -> State:
        return HERE if parameters(module).get(self.name) is not None else State("gone", "no longer a parameter")

    def compare(self, root: nn.Module, module: nn.Module, before: Any) -> State:
        tensor = parameters(module).get(self.name)
        if tensor is None or tensor.is_meta or not isinstance(before, Largest):
            return self.read(root, module, before)
        there = _entry(tensor, before.at) != before.value  # also if it was trained since: that is divided too
        return HERE if there else State("gone", "as before the patch")

    def lost(self, root: nn.Module, module: nn.Module, before: Any) -> str | None:
        return shared(self.name, parameters(module).get(self.name))

    def restore(self, root: nn.Module, module: nn.Module, before: Any) -> None:
        tensor = parameters(module).get(self.name)
        if tensor is not None and isinstance(before, Largest) and _entry(tensor, before.at) != before.value:
            tensor.detach().mul_(2.0**-self.exponent)


def _entry(tensor: torch.Tensor, at: int) -> float:
    return float(tensor.detach().flatten()[at])
