# transformers has no public name for the method that fills the buffers that no checkpoint holds
# pyright: reportPrivateUsage=false
"""Building a transformers model without weights, and the initial values of tensors that a checkpoint does not hold."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


def without_weights(cls: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model on meta from a copy of a config; dtypes are those that `from_pretrained(dtype=)` gives."""
    own = copy.deepcopy(config)
    live = own._attn_implementation
    making: Any = cls
    with torch.device("meta"), torch.random.fork_rng(devices=[]):  # some models draw on the CPU all the same
        return making._from_config(own, dtype=dtype, attn_implementation=live if live in ("eager", "sdpa") else "eager")


def fill(model: PreTrainedModel, module: nn.Module) -> None:
    """Fill a module with the initial values that the loader uses for tensors missing from a checkpoint."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"), default_dtype(torch.float32):
        model._init_weights(module)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    """Set torch's default dtype inside the context. Process-wide while it is on."""
    was = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(was)
