# torch.nn.Module keeps what it holds in tables that only copies of them are public of
# pyright: reportPrivateUsage=false
"""The tables of `torch.nn.Module`, two base classes of its layers, and the weights that RWKV scales by itself.

`named_children()` and its like make copies, leave out what is None and go over each object once; these are the tables
themselves. Known in torch 2.11 to 2.13. A module whose `__init__` did not call `super().__init__()` lacks them.

RWKV's forward divides some of its weights by powers of 2 in evaluation, in place, and multiplies them in training. A
LoRA layer around such a weight is divided in its base part only. Known in transformers 5.17 to 5.24.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

CHILDREN, PARAMETERS, BUFFERS = "_modules", "_parameters", "_buffers"
"""Keys of the tables in a module's `__dict__`."""

UNSAVED = "_non_persistent_buffers_set"
"""Key of the set of names of buffers that no state dict holds."""

RUNS = "_call_impl"
"""Name of the function in which torch runs a module's forward and its hooks, as a frame of the stack shows it."""

CONVOLUTIONS = nn.modules.conv._ConvNd
"""Base class of torch's convolutions."""

BATCH_NORMS = nn.modules.batchnorm._BatchNorm
"""Base class of torch's batch norms."""

RESCALE = "_rescale_layers"
"""Name of the method that scales the weights; a function of that name on an instance takes its place."""

RESCALED = "layers_are_rescaled"
"""Name of the attribute that says whether the weights are divided now."""


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's table of its children."""
    return module.__dict__[CHILDREN]


def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's table of its own parameters."""
    return module.__dict__[PARAMETERS]


def buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's table of its own buffers."""
    return module.__dict__[BUFFERS]


def unsaved(module: nn.Module) -> set[str]:
    """Return the names of a module's buffers that its state dict leaves out."""
    return module.__dict__[UNSAVED]


def scales_weights(module: nn.Module) -> bool:
    """True if a module's forward multiplies its own weights when the mode changes."""
    return hasattr(type(module), RESCALE)


def is_divided(module: nn.Module) -> bool:
    """True if a module's weights are divided now."""
    return bool(vars(module).get(RESCALED))


def divided_in_evaluation(module: nn.Module) -> dict[str, int]:
    """Return the linear maps whose weights a module divides in evaluation: path in it -> exponent of 2.

    Empty if it divides none, or if a function on the instance took the place of its method.
    """
    if not scales_weights(module) or RESCALE in vars(module):
        return {}
    return exponents(module)


def exponents(module: nn.Module) -> dict[str, int]:
    """Return the linear maps whose weights a module's class divides by a power of 2 above 1: path -> exponent."""
    config: Any = module.config
    every, blocks = int(config.rescale_every), dict(module.get_submodule("blocks").named_children())
    names = ("attention.output", "feed_forward.value")
    return {f"blocks.{i}.{n}": int(i) // every for i in blocks for n in names if 0 < every <= int(i)}


def in_place_of_scaling() -> None:
    """Do nothing, on an instance in place of the method: the weights stay as they are."""
