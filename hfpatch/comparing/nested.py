"""The tensors in nested arguments and outputs, by name, and the same structure with other tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers.utils import ModelOutput

from hfpatch.tracing.tensors import DEPTH, is_cache


def tensors_in(value: Any, name: str = "", depth: int = DEPTH) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of every tensor in lists, tuples, dicts and dataclasses; those of caches are left out."""
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    for key, part in _items(value) if depth else ():
        yield from tensors_in(part, f"{name}.{key}" if name else str(key), depth - 1)


def with_tensors(value: Any, made: Callable[[str, torch.Tensor], Any], name: str = "", depth: int = DEPTH) -> Any:
    """Return a value of the same structure with other tensors; caches and objects of other classes are kept.

    Args:
        value: The value.
        made: Returns what stands for a tensor, from its name and the tensor.
        name: Name of the value; empty for the outermost.
        depth: Nesting that is searched.
    """
    if isinstance(value, torch.Tensor):
        return made(name, value)
    parts = list(_items(value)) if depth else []
    if not parts:
        return value
    new = {key: with_tensors(part, made, f"{name}.{key}" if name else str(key), depth - 1) for key, part in parts}
    if all(new[key] is part for key, part in parts):
        return value
    if isinstance(value, ModelOutput):
        return type(value)(**new)
    if isinstance(value, Mapping):
        return {key: new[key] for key, _ in parts}
    if isinstance(value, tuple):
        rest: Any = new.values()
        return type(value)(*rest) if hasattr(value, "_fields") else tuple(rest)
    if isinstance(value, list):
        return list(new.values())
    other = copy.copy(value)
    for key, part in new.items():
        object.__setattr__(other, key, part)
    return other


MASK = 1e30
"""Size from which a value is a mask: the lowest value of a dtype, or one near it."""


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of a tensor in another dtype; the lowest value of a wide dtype becomes that of a narrow one."""
    out = tensor.to(dtype, copy=True)
    if dtype.itemsize < tensor.dtype.itemsize and tensor.is_floating_point() and bool(out.isinf().any()):
        lost = out.isinf() & tensor.isfinite() & (tensor.abs() >= MASK)
        out = torch.where(lost, torch.where(tensor < 0, torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype), out)
    return out


def is_mask(tensor: torch.Tensor) -> torch.Tensor:
    """Return where a floating-point tensor holds a value of a mask: bool, of the same shape."""
    return (tensor.abs() >= MASK) | (tensor == torch.finfo(tensor.dtype).min)


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if is_cache(value) or isinstance(value, (str, bytes, type)):
        return
    if isinstance(value, Mapping):
        yield from ((k, v) for k, v in value.items())  # pyright: ignore[reportUnknownVariableType]
    elif isinstance(value, (list, tuple)):
        names: Any = getattr(value, "_fields", None) or range(len(value))  # pyright: ignore[reportUnknownArgumentType]
        yield from zip(names, value, strict=True)  # pyright: ignore[reportUnknownArgumentType]
    elif dataclasses.is_dataclass(value):
        yield from ((f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value))
