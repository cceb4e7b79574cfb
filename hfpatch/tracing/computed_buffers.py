"""Compares buffers that a checkpoint does not hold with the values that their module computes when it is built.

Rotary frequencies and similar buffers are never loaded. In a model that was built on meta and then moved, they may be
uninitialised memory, and no error tells so.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
from torch import nn

from hfpatch.compat.modules import unsaved
from hfpatch.model.cast_buffers import Cast, cast_buffers
from hfpatch.model.survey import Survey
from hfpatch.model.walk import is_stock
from hfpatch.tracing.tensors import measurable

CHANGING = {"dynamic", "longrope"}
"""Kinds of rotary embedding that overwrite their frequencies at run time."""


def expected(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor, torch.Tensor]]:
    """Yield module path, buffer name, buffer, and the value its module computes at build (on the CPU, in its dtype)."""
    for path, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        absent = [n for n in unsaved(module) if n in buffers and measurable(buffers[n])]
        if not absent or not is_stock(type(module)):
            continue
        for name, value in _as_built(module, absent).items():
            if buffers[name].shape == value.shape:
                yield path, name, buffers[name], value.to(buffers[name].dtype)


def cast(model: nn.Module) -> tuple[Cast, ...]:
    """Return the buffers of a model that a cast rounded."""
    return cast_buffers(Survey(model)).cast


def _as_built(module: nn.Module, names: list[str]) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for name in names:
        scalar = getattr(module, f"scalar_{name}", None)
        if isinstance(scalar, (int, float)):
            out[name] = torch.tensor(float(scalar), device="cpu", dtype=torch.float32)
    kind = getattr(module, "rope_type", "default")
    kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
    config = getattr(module, "config", None)
    if config is None or kinds & CHANGING or next(module.parameters(), None) is not None or not _takes_config(module):
        return out
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        try:
            made = type(module)(config)
        except (TypeError, ValueError, AttributeError, LookupError):
            return out  # it needs more than a config to be built: nothing to compare with
    built = {n: b for n, b in made.named_buffers(recurse=False) if n in names and not b.is_meta}
    return {**built, **out}


def _takes_config(module: nn.Module) -> bool:
    parameters = list(inspect.signature(type(module).__init__).parameters.values())[1:]
    return bool(parameters) and all(p.default is not inspect.Parameter.empty for p in parameters[1:])
