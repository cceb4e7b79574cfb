"""The two halves of LoRA's adapters, and noise in place of a half that is 0."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from hfpatch.compat.peft import halves
from hfpatch.guarding.checking.subject import Subject
from hfpatch.guarding.checks import clean_name


@dataclass(frozen=True)
class Pair:
    """The two halves of one adapter of one layer: what it adds is B A x, and B is 0 at the start.

    Attributes:
        a, b: Names of the halves.
        low, high: The parameters.
        trains_a, trains_b: True if the optimizer moves them.
    """

    a: str
    b: str
    low: nn.Parameter
    high: nn.Parameter
    trains_a: bool
    trains_b: bool

    @property
    def zero_a(self) -> bool:
        """True if A is exactly 0."""
        return not bool(self.low.detach().any())

    @property
    def zero_b(self) -> bool:
        """True if B is exactly 0."""
        return not bool(self.high.detach().any())


def pairs(subject: Subject) -> list[Pair]:
    """Return the two halves of each adapter of each layer, trained or not."""
    named = {clean_name(n): p for n, p in subject.model.named_parameters()}
    trained = {n for n, p in subject.parameters.items() if p.requires_grad}
    return [Pair(a, b, named[a], named[b], a in trained, b in trained) for a, b in halves(named)]


def noise(parameter: nn.Parameter, draw: torch.Generator) -> torch.Tensor:
    """Return noise of a parameter's shape, dtype and device, of a size at which its output is as large as its input."""
    width = parameter.shape[-1] if parameter.dim() else 1
    drawn = torch.randn(parameter.shape, generator=draw, device="cpu", dtype=torch.float32)
    return (drawn / max(width, 1) ** 0.5).to(parameter)
