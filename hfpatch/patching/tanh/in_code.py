"""Finds tanh and 1 in the bytecode of a module's functions, without running them."""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

FUNCTIONAL_TANH: Any = torch.nn.functional.tanh
DEPTH = 4
"""Number of levels of helper functions that are followed."""


class Mention(NamedTuple):
    """The mentions in functions: of tanh, of the number 1, of `torch.nn.functional.tanh`."""

    tanh: bool = False
    one: bool = False
    functional: bool = False

    def __or__(self, other: object) -> Mention:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Mention(*(a or b for a, b in zip(self, other, strict=True))) if isinstance(other, Mention) else self


def is_torch(module: nn.Module) -> bool:
    """True if a module's class is torch's own."""
    return type(module).__module__.startswith("torch.")


def may_add_one(module: nn.Module) -> bool:
    """True if a module's own code, also with a direct child's tanh, may compute 1 + tanh. False for torch's classes."""
    if is_torch(module):
        return False
    own = mention(module)
    for child in module.children():
        own = own | (Mention(tanh=isinstance(child, nn.Tanh)) if is_torch(child) else mention(child))
    return own.tanh and own.one


def calls_functional_tanh(module: nn.Module) -> bool:
    """True if the code of a module, or of a module inside it, calls `torch.nn.functional.tanh`."""
    return any(mention(m).functional for m in module.modules() if not is_torch(m))


def mention(module: nn.Module) -> Mention:
    """Return the mentions in the methods of a module's class, and in functions that it holds or calls by name."""
    found = _of_class(type(module))
    for value in module.__dict__.values():
        if isinstance(value, types.MethodType):
            value = value.__func__  # noqa: PLW2901
        if value in (torch.tanh, torch.Tensor.tanh) if callable(value) and not isinstance(value, nn.Module) else False:
            found = found | Mention(tanh=True)
        elif isinstance(value, types.FunctionType):
            found = found | _of_function(value, DEPTH)
    return found


@cache
def _of_class(cls: type[nn.Module]) -> Mention:
    found = Mention()
    for base in cls.__mro__:
        if base.__module__.startswith("torch.") or base is object or base.__name__ == "PreTrainedModel":
            continue
        for value in vars(base).values():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if inspect.isfunction(function):
                found = found | _of_function(function, DEPTH)
    return found


@cache
def _of_function(function: types.FunctionType, depth: int) -> Mention:
    if function is FUNCTIONAL_TANH:
        return Mention(tanh=True, functional=True)
    home = function.__module__ or ""
    if depth == 0 or home.startswith(("torch.", "transformers.modeling_utils")):
        return Mention()
    found = Mention()
    wrapped = getattr(function, "__wrapped__", None)
    if inspect.isfunction(wrapped):
        found = _of_function(wrapped, depth - 1)
    for code in _codes(function.__code__):
        found = found | _of_code(code, function.__globals__, depth)
    return found


def _of_code(code: types.CodeType, scope: dict[str, Any], depth: int) -> Mention:
    found, before = Mention(), None
    for step in dis.get_instructions(code):
        if step.opname in ("CACHE", "NOP", "PUSH_NULL", "PRECALL"):
            continue
        value = step.argval
        if isinstance(value, str) and step.opname.startswith("LOAD_"):
            if value in ("tanh", "tanh_", "Tanh"):
                module = scope.get(before) if isinstance(before, str) else None
                functional = before == "functional" or module is torch.nn.functional
                found = found | Mention(tanh=True, functional=functional)
            elif value in ("ones", "ones_like", "new_ones"):
                found = found | Mention(one=True)
            called = scope.get(value) if "GLOBAL" in step.opname or "NAME" in step.opname else None
            if inspect.isfunction(called):
                found = found | _of_function(called, depth - 1)
        elif isinstance(value, (int, float)) and value == 1 and step.opname.startswith(("LOAD_CONST", "LOAD_SMALL")):
            found = found | Mention(one=True)
        before = value
    return found


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
