"""Tiny language models with a typical modulation: a low-rank one at the output of each decoder layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfpatch.compat import hooks
from hfpatch.errors import InputError
from hfpatch.model.survey import Survey


class Modulation(nn.Module):
    """`h * (1 + tanh(B_mult A h)) + B_add A h`.

    Args:
        width: Size of the last dimension of `h`.
        rank: Size of `A h`.
    """

    def __init__(self, width: int, rank: int = 4) -> None:
        super().__init__()
        self.width = width
        self.a_proj = nn.Linear(width, rank, bias=False)
        self.b_add = nn.Linear(rank, width, bias=False)
        self.b_mult = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.b_add.weight)
        nn.init.zeros_(self.b_mult.weight)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Modulate `h [..., width]`."""
        low_rank = self.a_proj(h)
        return h * (1 + torch.tanh(self.b_mult(low_rank))) + self.b_add(low_rank)

    def scaled(self, h: torch.Tensor, by: float) -> torch.Tensor:
        """Return the module's output for `h` if every element of the modulation vector is `by`."""

        def fill(_module: nn.Module, _args: Any, out: Any) -> torch.Tensor:
            return torch.full_like(out, by)

        handle = hooks.after(self.b_mult, fill)
        try:
            return self(h)
        finally:
            handle.remove()


class Gate(nn.Module):
    """`h + tanh(gate) * F h`: a branch that starts at 0, as in Flamingo and models derived from it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width, bias=False)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Add the gated branch to `h [..., width]`."""
        return h + torch.tanh(self.gate) * self.proj(h)


class RunPart:
    """A forward hook that applies a layer's child `modulation` to its output."""

    def __call__(self, layer: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        """Return the output, modulated; of a tuple, only the first item."""
        run: Any = layer.modulation
        return (run(output[0]), *output[1:]) if isinstance(output, tuple) else run(output)


def modulated(llm: PreTrainedModel) -> nn.Module:
    """Return the model with an untrained `Modulation` in each decoder layer. `llm` is changed."""
    return _with_parts(llm, Modulation)


def trained_modulated(llm: PreTrainedModel) -> nn.Module:
    """Return the model with a `Modulation` with nonzero weights in each decoder layer. `llm` is changed."""
    model = _with_parts(llm, Modulation)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Modulation):
                noise = torch.randn(module.b_mult.weight.shape, generator=generator)
                module.b_mult.weight.copy_(0.1 * noise)
    return model


def gated(llm: PreTrainedModel) -> nn.Module:
    """Return the model with a `Gate` in each decoder layer. `llm` is changed."""
    return _with_parts(llm, Gate)


def _with_parts(llm: PreTrainedModel, part: type[Modulation] | type[Gate]) -> nn.Module:
    stacks = list(Survey(llm).stacks.values())
    if not stacks:
        raise InputError(f"{type(llm).__name__} has no list of decoder layers for modulations; use a decoder")
    width = int(llm.config.get_text_config().hidden_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _, layer in stacks[-1][-1].items:
            layer.add_module("modulation", part(width))
            hooks.after(layer, RunPart())
    return llm
