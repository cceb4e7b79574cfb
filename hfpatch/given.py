"""Checks of the arguments of public functions, made before anything else is done."""

from __future__ import annotations

import errno
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from hfpatch.errors import InputError

if TYPE_CHECKING:
    import torch

SHOWN = 60
"""Characters of a value that an error message quotes."""


@dataclass(frozen=True)
class Kind:
    """A kind of argument: its description, and a test for it."""

    words: str
    fits: Callable[[Any], bool]


def want(call: str, **given: tuple[Any, Kind]) -> None:
    """Raise if an argument is not of its kind.

    Args:
        call: Name of the function that was called.
        given: Each argument with its kind.

    Raises:
        InputError: An argument is not of its kind; the message says which kind is wanted and what was passed.
    """
    for name, (value, kind) in given.items():
        if not kind.fits(value):
            raise InputError(f"{call}: want {kind.words} as {name}=, got {shown(value)}")


def torch_optimizer(call: str, optimizer: object) -> torch.optim.Optimizer:
    """Return the torch optimizer inside one that accelerate prepared.

    Raises:
        InputError: There is no torch optimizer.
    """
    from hfpatch.compat.optimizers import inside

    found = inside(optimizer)
    if found is None:
        raise InputError(f"{call}: want a torch optimizer, or one that accelerate prepared; got {shown(optimizer)}")
    return found


def shown(value: object) -> str:
    """Return a short text for a value: its repr where that is short and safe to call, else its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if _is_plain(value, 2):
        text = repr(value)
        return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    return f"a value of type {type(value).__name__}"


def _is_plain(value: Any, depth: int) -> bool:
    """True if it is a built-in value, or a small container of such values, so that repr runs no other code."""
    if value is None or type(value) in (str, bytes, bool, float, complex):
        return True
    if type(value) is int:
        return abs(value) < 2**64
    if depth == 0 or type(value) not in (list, tuple, set, dict) or len(value) > 8:
        return False
    items = (*value, *value.values()) if type(value) is dict else tuple(value)
    return all(_is_plain(item, depth - 1) for item in items)


def optional(kind: Kind) -> Kind:
    """Return the kind that also accepts None."""
    return Kind(f"{kind.words} or None", lambda value: value is None or kind.fits(value))


def instance(words: str, home: Callable[[], type]) -> Kind:
    """Return the kind of instances of a class; `home` imports and returns that class."""
    return Kind(words, lambda value: isinstance(value, home()))


def having(words: str, *methods: str) -> Kind:
    """Return the kind of objects that have these methods."""
    return Kind(words, lambda v: not isinstance(v, type) and all(callable(getattr(v, m, None)) for m in methods))


def _is_path(value: Any) -> bool:
    """True for a path, whether or not something is there."""
    if not isinstance(value, (str, os.PathLike)):
        return False
    try:
        os.stat(value)  # noqa: PTH116 - a Path of it would raise for an object whose path is none
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    except (ValueError, TypeError):  # a null byte; an object whose path is none
        return False
    return True


def _is_whole(value: Any) -> bool:
    """True if it is an integer that fits in 64 bits."""
    return type(value) is not bool and isinstance(value, Integral) and -(2**63) <= int(value) < 2**63


def _is_real(value: Any) -> bool:
    """True if it is a real number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return not isinstance(value, Integral) or abs(int(value)) <= sys.float_info.max


def _takes_one(value: Any) -> bool:
    """True if it can be called with one argument, as far as its signature tells; False for a torch module."""
    if not callable(value) or any(c.__module__.startswith("torch.nn.") for c in inspect.getmro(type(value))):
        return False
    try:
        inspect.signature(value).bind(None)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def _tensor() -> type:
    import torch

    return torch.Tensor


def _is_float_dtype(value: Any) -> bool:
    import torch

    return (
        value in (torch.float16, torch.bfloat16, torch.float32, torch.float64) if type(value) is torch.dtype else False
    )


def _is_device(value: Any) -> bool:
    """True if a tensor can be made on this device."""
    import torch

    try:
        torch.empty(0, device=value)
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError):
        return False
    return True


FLAG = Kind("True or False", lambda v: type(v).__name__ in ("bool", "bool_") or (type(v) is int and v in (0, 1)))
TEXT = Kind("a string", lambda v: isinstance(v, str))
WHOLE = Kind("a whole number", _is_whole)
SIZE = Kind("a positive integer", lambda v: _is_whole(v) and 0 < v < 2**31)
REAL = Kind("a number", _is_real)
NUMBER = Kind("a number", lambda v: _is_real(v) and not math.isnan(v))
FUNCTION = Kind("a function of one argument", _takes_one)
PATH = Kind("a path", _is_path)
MAPPING = Kind("a dict", lambda v: isinstance(v, Mapping))
TENSOR = instance("a tensor", _tensor)
DEVICE = Kind("a device that torch can use here", _is_device)
FLOATING = Kind("torch.float16, bfloat16, float32 or float64", _is_float_dtype)
