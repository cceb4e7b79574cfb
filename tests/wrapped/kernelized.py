"""`kernels.kernelize` before and after a patch, with layers that this file makes: the hub is never asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.cells import Outcome, through
from tests.interrupts import SUBJECTS


class Norm(nn.Module):
    """An RMSNorm for the modules that transformers calls `RMSNorm`."""

    def forward(self, hidden_states: Any) -> Any:
        wide: Any = hidden_states.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * scaled.to(hidden_states.dtype)


class Gelu(nn.Module):
    """What transformers calls `NewGELU`."""

    def forward(self, input: Any) -> Any:  # noqa: A002 - its name there
        return functional.gelu(input, approximate="tanh")


class Silu(nn.Module):
    """What transformers calls `SiLU`."""

    def forward(self, input: Any) -> Any:  # noqa: A002 - its name there
        return functional.silu(input)


class Here:
    """A repository as `kernels` takes them: `load` returns the layer."""

    def __init__(self, layer: type[nn.Module]) -> None:
        self.load: Callable[[], type[nn.Module]] = lambda: layer


LAYERS = {"RMSNorm": Here(Norm), "NewGELU": Here(Gelu), "SiLU": Here(Silu)}


def wrap(model: nn.Module) -> nn.Module:
    from kernels import Mode, kernelize, use_kernel_mapping

    modes = {Mode.INFERENCE: 0, Mode.TRAINING: 0}
    mapping: Any = {name: {"cpu": dict.fromkeys(modes, layer)} for name, layer in LAYERS.items()}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        return kernelize(model, mode=Mode.TRAINING, device="cpu")


def row(kind: str, order: str) -> Outcome:
    return through(SUBJECTS[kind], wrap, order, rounding=5e-3)
