# torch.nn.Module keeps what it holds in tables that only copies of them are public of
# pyright: reportPrivateUsage=false
"""The tables of `torch.nn.Module`, and two base classes of its layers.

`named_children()` and its like make copies, leave out what is None and go over each object once; these are the tables
themselves. Known in torch 2.11 to 2.13. A module whose `__init__` did not call `super().__init__()` lacks them.
"""

from __future__ import annotations

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
