"""The tensors in the arguments or output of a module: nested lists, dicts, ModelOutputs and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch

DEPTH = 8
"""Deepest nesting of containers that is searched."""

NUMBERS = tuple(map(str, range(256)))
PLAIN = (int, float, str, bool, bytes)
ORDINARY = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
FLOATING = frozenset(
    d for d in vars(torch).values() if isinstance(d, torch.dtype) and (d.is_floating_point or d.is_complex)
)


def floating(value: Any, name: str = "", depth: int = DEPTH) -> list[tuple[str, torch.Tensor]]:
    """Return name and tensor of every floating-point or complex tensor that can be measured.

    Names are keys and indices joined by dots: `logits`, `0`, `hidden_states.3`. Integer, boolean, meta, quantised and
    sparse tensors are left out. So are key-value caches, because every layer is passed the whole cache; `cached`
    returns their tensors.
    """
    if isinstance(value, torch.Tensor):
        return [(name, value)] if measurable(value) else []
    found: list[tuple[str, torch.Tensor]] = []
    if depth:
        for key, part in _parts(value):
            if part is None or type(part) in PLAIN:
                continue
            path = f"{name}.{key}" if name else key
            if not isinstance(part, torch.Tensor):
                found += floating(part, path, depth - 1)
            elif measurable(part):
                found.append((path, part))
    return found


def every(value: Any, depth: int = DEPTH) -> Iterator[torch.Tensor]:
    """Yield every tensor in arguments, of any dtype; those in key-value caches are left out."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple)):
        for part in value:
            yield from every(part, depth - 1)
    elif depth and isinstance(value, Mapping):
        for part in value.values():
            yield from every(part, depth - 1)


def measurable(tensor: torch.Tensor) -> bool:
    """True if a tensor is dense and floating-point or complex, and holds values on a device."""
    if tensor.dtype not in FLOATING or tensor.layout != torch.strided or tensor.is_meta:
        return False
    return type(tensor) in ORDINARY or is_sharded(tensor)


def is_sharded(tensor: torch.Tensor) -> bool:
    """True if this is a DTensor."""
    return type(tensor).__name__ == "DTensor"


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor; a plain tensor as it is."""
    if type(tensor) in ORDINARY:
        return tensor
    return tensor.to_local() if is_sharded(tensor) else tensor  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    kind = type(value)
    if kind is dict:
        return value.items()
    if kind in (tuple, list):
        return (
            zip(NUMBERS, value, strict=False)
            if len(value) <= len(NUMBERS)
            else ((str(i), v) for i, v in enumerate(value))
        )
    if isinstance(value, Mapping):
        return [(str(k), v) for k, v in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        names: Any = getattr(value, "_fields", None) or range(len(value))
        return [(str(k), v) for k, v in zip(names, value, strict=True)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    return ()


def cached(value: Any, name: str = "", depth: int = DEPTH) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of the measurable tensors in the key-value caches among the arguments of a model."""
    for key, part in _parts(value) if depth else ():
        path = f"{name}.{key}" if name else str(key)
        if is_cache(part):
            for index, layer in enumerate(getattr(part, "layers", ())):
                yield from floating(dict(vars(layer)), f"{path}.layers.{index}")
            yield from cached({n: v for n, v in vars(part).items() if is_cache(v)}, path, depth - 1)
        else:
            yield from cached(part, path, depth - 1)


def is_cache(value: Any) -> bool:
    """True if this is a cache of transformers."""
    return _is_cache(type(value))


@cache
def _is_cache(cls: type) -> bool:
    return any(c.__name__ == "Cache" and c.__module__ == "transformers.cache_utils" for c in cls.__mro__)
