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


def built(cls: type[PreTrainedModel], config: PreTrainedConfig, dtype: Any, attention: str | None = None) -> Any:
    """Build a class from a config in a dtype, as `from_pretrained` does before it loads weights.

    Args:
        cls: The class.
        config: It may be written to.
        dtype: Of its parameters; torch's default if None.
        attention: The implementation; the one that transformers chooses if not given.
    """
    words = {} if attention is None else {"attn_implementation": attention}
    making: Any = cls
    return making._from_config(config, dtype=dtype, **words)


def without_weights(cls: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a class from a copy of a config on meta; dtypes are those that `from_pretrained(dtype=)` gives."""
    own = copy.deepcopy(config)
    live = chosen(own)
    with torch.device("meta"), torch.random.fork_rng(devices=[]):  # some draw on the CPU all the same
        return built(cls, own, dtype, live if live in ("eager", "sdpa") else "eager")


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
