"""Weights that a model divides in evaluation, as RWKV does; the part of an adapter around one is not divided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from hfpatch.compat.rwkv import divided_in_evaluation
from hfpatch.model.walk import peek


def scaled_maps(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, int]:
    """Return the linear maps whose weights are divided in evaluation, by path, with the exponent of 2."""
    found: dict[str, int] = {}
    for path, module in modules:
        prefix = f"{path}." if path else ""
        found |= {f"{prefix}{name}": exponent for name, exponent in divided_in_evaluation(module).items()}
    return found


def plain_weight(module: nn.Module) -> nn.Parameter | None:
    """Return the weight of a linear map, or of the map in an adapted one; None if it is quantised or sharded."""
    weight: Any = peek(module, "weight")
    return weight if type(weight) is nn.Parameter and weight.is_floating_point() else None


def undivided_peak(modules: Iterable[tuple[str, nn.Module]], peaks: Mapping[str, float]) -> float:
    """Return the largest value that the streams reach if no weight is divided, from a run in which they are.

    Args:
        modules: The modules by path.
        peaks: The largest values of each module's own operations in that run, by path.
    """
    found = 0.0
    for path, exponent in scaled_maps(modules).items():
        block = path.rpartition(".")[0].rpartition(".")[0]
        found = max(found, peaks.get(block, 0.0) * 2**exponent)
    return found
