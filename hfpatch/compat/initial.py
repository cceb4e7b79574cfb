# transformers has no public name for what fills the buffers that no checkpoint holds
# pyright: reportPrivateUsage=false
"""How transformers makes a model without weights, and what its loader fills in where a checkpoint holds nothing."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hfpatch.compat.implementation import chosen


def without_weights(cls: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a class from a copy of a config on meta; dtypes are those that `from_pretrained(dtype=)` gives."""
    own = copy.deepcopy(config)
    live = chosen(own)
    making: Any = cls
    with torch.device("meta"), torch.random.fork_rng(devices=[]):  # some draw on the CPU all the same
        return making._from_config(own, dtype=dtype, attn_implementation=live if live in ("eager", "sdpa") else "eager")


def fill(model: PreTrainedModel, module: nn.Module) -> None:
    """Give a module of a model the initial values that the loader gives what a checkpoint does not hold."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"), default_dtype(torch.float32):
        model._init_weights(module)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    """Make floating-point tensors in a dtype where none is named. Process-wide while it is on, as torch has it."""
    was = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(was)
