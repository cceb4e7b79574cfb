"""A model that runs in evaluation for a while, and has its weights and attributes back afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import nn

from hfpatch.compat.rwkv import (
    RESCALE,
    RESCALED,
    divided_in_evaluation,
    exponents,
    in_place_of_scaling,
    is_divided,
    scales_weights,
)
from hfpatch.model.evaluating.divided import plain_weight
from hfpatch.model.evaluating.fast_path import ACTIVATION, NESTED


@contextlib.contextmanager
def in_evaluation_form(root: nn.Module) -> Generator[None]:
    """Divide the weights that the next forward in evaluation would divide, and restore them afterwards.

    A forward that divides them itself would leave them divided. Weights that are not plain (quantised) stay as they
    are, and are not divided.
    """
    held: dict[nn.Parameter, torch.Tensor] = {}
    kept: list[tuple[nn.Module, dict[str, Any]]] = []
    try:
        for module in root.modules():
            maps = divided_in_evaluation(module)
            if maps and not is_divided(module):
                kept.append((module, dict(vars(module))))
                plain = _scale(module, {name: 0.5**exponent for name, exponent in maps.items()}, held)
                module.__dict__.update({RESCALED: True} if plain else {RESCALE: in_place_of_scaling})
        yield
    finally:
        _put_back(held, kept)


@contextlib.contextmanager
def as_trained(root: nn.Module) -> Generator[None]:
    """Make evaluation compute what training does, dropout apart: all children run, and no weight is divided."""
    held: dict[nn.Parameter, torch.Tensor] = {}
    kept: list[tuple[nn.Module, dict[str, Any]]] = []
    try:
        for module in root.modules():
            if scales_weights(module):
                kept.append((module, dict(vars(module))))
                if not is_divided(module) or _scale(module, {n: 2.0**k for n, k in exponents(module).items()}, held):
                    module.__dict__.update({RESCALE: in_place_of_scaling, RESCALED: False})
            elif isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerEncoder)):
                kept.append((module, dict(vars(module))))
                module.__dict__[ACTIVATION if isinstance(module, nn.TransformerEncoderLayer) else NESTED] = 0
        yield
    finally:
        _put_back(held, kept)


def _scale(module: nn.Module, factors: dict[str, float], held: dict[nn.Parameter, torch.Tensor]) -> bool:
    """Multiply weights of a module, by the path of their map, in new memory; False if one of them is not plain."""
    weights: dict[nn.Parameter, float] = {}
    for name, factor in factors.items():
        weight = plain_weight(module.get_submodule(name))
        if weight is None:
            return False
        weights[weight] = factor
    for weight, factor in weights.items():
        held[weight] = weight.data
        weight.data = weight.data * factor
    return True


def _put_back(held: dict[nn.Parameter, torch.Tensor], kept: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    for weight, data in held.items():
        weight.data = data
    for module, values in kept:
        for name in (ACTIVATION, NESTED, RESCALE, RESCALED):
            if name in values:
                module.__dict__[name] = values[name]
            else:
                module.__dict__.pop(name, None)
