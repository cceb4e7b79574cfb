"""Plain JSON values as values of declared types: nothing is converted, and nothing of another type is taken."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from hfpatch.dtypes import dtype_name
from hfpatch.given import shown


def typed(value: Any, wanted: Any, at: str = "") -> Any:
    """Return a JSON value as one of a type: a list as a tuple, an object as a dataclass with exactly its fields.

    Args:
        value: The value.
        wanted: The type: plain types, `Any`, `Literal`, unions, tuples, dicts by string, `torch.dtype`, dataclasses.
        at: Its place in the file, for the message.

    Raises:
        TypeError: The value is of another type.
    """
    origin, inner = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return value
    if dataclasses.is_dataclass(wanted) and isinstance(wanted, type):
        return _dataclass(value, wanted, at)
    if origin is tuple and isinstance(value, list):
        items: list[Any] = value
        kinds = inner[:1] * len(items) if inner[-1] is ... else inner
        if len(kinds) == len(items):
            return tuple(typed(v, kind, f"{at}[{i}]") for i, (v, kind) in enumerate(zip(items, kinds, strict=True)))
    elif origin is dict and isinstance(value, dict):
        held: dict[str, Any] = value
        return {name: typed(v, inner[1], f"{at}.{name}") for name, v in held.items()}
    elif origin is Literal:
        if isinstance(value, str) and value in inner:
            return value
    elif origin in (Union, types.UnionType):
        for kind in inner:
            with contextlib.suppress(TypeError):
                return typed(value, kind, at)
    elif wanted is torch.dtype:
        if isinstance(value, str) and isinstance(found := getattr(torch, value, None), torch.dtype):
            return found
    elif wanted is types.NoneType and value is None:
        return None
    elif type(value) is wanted or (wanted is float and type(value) is int):
        return value
    raise TypeError(f"{at} is {shown(value)}")


def plain(value: Any) -> Any:
    """Return a value as JSON that `typed` reads back.

    Raises:
        TypeError: JSON does not hold it.
    """
    if value is None or isinstance(value, (bool, str, int)) or (isinstance(value, float) and abs(value) < float("inf")):
        return value
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, (tuple, list)):
        items: Any = value
        return [plain(each) for each in items]
    if isinstance(value, dict):
        held: dict[Any, Any] = value
        return {str(name): plain(each) for name, each in held.items()}
    if dataclasses.is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    raise TypeError(f"a value of type {type(value).__name__} is not data")


def _dataclass(value: Any, wanted: type, at: str) -> Any:
    hints = _fields(wanted)
    if not isinstance(value, dict) or value.keys() != hints.keys():
        raise TypeError(f"{at} is {shown(value)}: want {', '.join(hints)}")
    held: dict[str, Any] = value
    return wanted(**{name: typed(held[name], kind, f"{at}.{name}".lstrip(".")) for name, kind in hints.items()})


@cache
def _fields(cls: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields, by name."""
    hints = get_type_hints(cls)
    return {each.name: hints[each.name] for each in dataclasses.fields(cls)}
