"""A trial run of a tiny model of a class with buffers in float32 that the loader leaves in half precision."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfpatch.compat import hooks
from hfpatch.compat.modules import buffers
from hfpatch.lab.example import example_inputs
from hfpatch.lab.tiny import tiny_config, tiny_of_class
from hfpatch.model.cast_buffers import Cast
from hfpatch.model.rebuilt import main_dtype
from hfpatch.model.source import REJECTIONS
from hfpatch.model.survey import Survey
from hfpatch.model.walk import inside, stock_class
from hfpatch.patching.kinds.cast_input import CastInput
from hfpatch.patching.kinds.dtype_rule import dtype_rule

TAIL = 1 + 2.0**-13
"""Factor on a buffer that half precision rounds away."""


@dataclass(frozen=True)
class Tried:
    """The outcome of a trial.

    Attributes:
        differs: True if the output changes with the buffers in float32.
        casts: True if it runs only with what enters the first layer cast to the dtype of its weights.
        error: The error that the model raised with them; empty if it ran.
    """

    differs: bool
    casts: bool = False
    error: str = ""


def tried(survey: Survey, wider: Iterable[Cast]) -> Tried:
    """Run a tiny model of each class that has such buffers, with them in half precision and in float32."""
    places = {cast.path: (type(cast.module).__name__, cast.name) for cast in wider}
    found: list[Tried] = []
    for submodel in survey.outermost_built:
        mine = frozenset(kind for path, kind in places.items() if inside(path, submodel.path))
        cls = stock_class(submodel.model)
        if mine and cls is not None:
            found.append(_tried(cls, submodel.architecture, main_dtype(submodel.model), mine))
    failed = next((each for each in found if each.error), None)
    return failed or Tried(any(each.differs for each in found), any(each.casts for each in found))


@lru_cache(maxsize=32)
def _tried(
    cls: type[PreTrainedModel], architecture: str, dtype: torch.dtype, kinds: frozenset[tuple[str, str]]
) -> Tried:
    try:
        model = tiny_of_class(cls, tiny_config(architecture))
        nn.Module.to(model, dtype)  # in place
        given = {k: _cast(v, dtype) for k, v in example_inputs(model).items()}
        stock = _outputs(model, given)
        for module in model.modules():
            for name, value in buffers(module).items():
                if value is not None and (type(module).__name__, name) in kinds:
                    buffers(module)[name] = value.float() * TAIL
        wide, casts = _wider(model, given)
    except (*REJECTIONS, NotImplementedError) as error:
        return Tried(differs=False, error=f"{type(error).__name__}: {error}".splitlines()[0])
    return Tried(len(wide) != len(stock) or not all(map(torch.equal, wide, stock)), casts)


def _wider(model: PreTrainedModel, given: dict[str, Any]) -> tuple[list[torch.Tensor], bool]:
    """Return the outputs, and True if they needed casts at the first layers."""
    try:
        return _outputs(model, given), False
    except RuntimeError:
        for stacks in Survey(model).stacks.values():
            for stack in stacks:
                first = stack.items[0][1]
                hooks.before(first, CastInput(dtype_rule("weights", first, None, None)), with_kwargs=True)
        return _outputs(model, given), True


def _outputs(model: PreTrainedModel, given: dict[str, Any]) -> list[torch.Tensor]:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        out: Any = model(**given)
    return [value.float() for value in out.values() if isinstance(value, torch.Tensor)]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
