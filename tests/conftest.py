"""Tiny models, built once a session and copied for each test."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
import transformers
from torch import nn

from hfpatch.model.tiny import rescale, tiny_model

OVERFLOWING = {"*post_feedforward_layernorm.weight": 24000.0}


@pytest.fixture(autouse=True, scope="session")
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@cache
def _built(architecture: str) -> nn.Module:
    return tiny_model(architecture)


@pytest.fixture
def tiny() -> Callable[[str], nn.Module]:
    """`tiny(architecture)`: a fresh copy of a tiny model."""
    return lambda architecture: copy.deepcopy(_built(architecture))


@pytest.fixture
def gemma(tiny: Callable[[str], nn.Module]) -> Iterator[nn.Module]:
    """A float16 Gemma 3 whose residual stream overflows."""
    model = tiny("gemma3_text")
    rescale(model, {}, OVERFLOWING)
    yield model.half()


@pytest.fixture
def ids() -> torch.Tensor:
    return (torch.arange(24).reshape(2, 12) * 7 + 3) % 64
