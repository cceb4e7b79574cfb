"""Modules and what they were passed, left as they were by code that runs them."""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, deque
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import Any

import torch
from torch import nn

from hfpatch.compat.modules import BUFFERS
from hfpatch.compat.quantising.quantised import changed_by_a_run, put_back

DEPTH = 8
"""Deepest nesting of containers in an attribute that is looked at."""

LARGE = 2**28
"""Bytes from which a tensor is not copied: a data set that hangs on a module, not its state."""
PACKED = 2**20
"""Elements from which an integer tensor is not copied: packed weights, which no forward writes to."""
CACHES = "transformers.cache_utils"
"""The module of transformers whose classes are key-value caches and their layers."""

_KNOWN = frozenset({"torch", "transformers", "peft", "accelerate", "hfpatch", "numpy", *sys.stdlib_module_names})

_ATOMS = frozenset({str, int, float, bool, NoneType, FunctionType, MethodType, BuiltinFunctionType, torch.dtype})
"""Classes of most values; they hold no state."""
_CONTAINERS = frozenset({dict, OrderedDict, list, set, deque, tuple})
"""Classes of most containers: no dataclasses, and known before it is asked what is a tensor, which takes long."""

Found = dict[int, tuple[Any, Any, str]]
"""Containers and tensors by id: each with a copy of its content, and the name of the attribute that holds it."""


@contextmanager
def state_as_before(modules: Iterable[nn.Module], passed: Iterable[object] = ()) -> Generator[list[str]]:
    """Put back what modules hold, and containers that they were passed, whatever is raised in the context.

    Attributes and tables come back, and so does the content of dicts, lists, sets, deques, dataclasses, caches of
    transformers and objects of the user's own classes in them, of every tensor there that is neither a parameter nor
    large, and the state of a `torch.Generator`.

    Args:
        modules: Modules whose attributes are put back, such as `model.modules()`.
        passed: Arguments of a forward, of which only containers and caches are put back.

    Returns:
        A list of names, empty until the context ends: buffers, attributes and caches that had been changed.
    """
    changed: list[str] = []
    found: Found = {}
    ran = list(modules)
    packed = changed_by_a_run(ran)
    for module in ran:
        _look(module.__dict__, "", found, DEPTH, True)
    for value in passed:
        _look(value, "an argument", found, DEPTH, False)
    try:
        yield changed
    finally:
        put_back(packed)
        changed += sorted(set(_all_restored(found)))


def _all_restored(found: Found) -> list[str]:
    """Put everything back, tables before tensors; an interruption is raised when that is done."""
    names: list[str] = []
    interrupted: BaseException | None = None
    for value, before, name in sorted(
        found.values(), key=lambda kept: not isinstance(kept[0], (dict, list, set, deque))
    ):
        try:
            names += _restored(value, before, name)
        except BaseException as error:  # noqa: BLE001 - raised below
            interrupted = error
            names += _restored(value, before, name)
    if interrupted is not None:
        raise interrupted
    return names


def _look(value: Any, name: str, found: Found, depth: int, tensors: bool) -> None:
    if type(value) in _ATOMS or id(value) in found or depth == 0:
        return
    if type(value) not in _CONTAINERS:
        if isinstance(value, torch.Tensor):
            if tensors and not isinstance(value, nn.Parameter) and _copied(value):
                found[id(value)] = value, value.detach().clone(), name
            return
        if isinstance(value, torch.Generator):
            found[id(value)] = value, value.get_state(), name
            return
        if _holds_state(value):
            tensors = tensors or bool(getattr(value, "is_compileable", False))  # such a cache is written to in place
            value = value.__dict__
    if isinstance(value, dict):
        parts: Iterable[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, (list, set, deque, tuple)):
        parts = [(None, part) for part in value]
    else:
        return
    if not isinstance(value, tuple):
        found[id(value)] = value, value.copy(), name
    for key, part in parts:
        inner = name or ("" if key == BUFFERS else str(key))
        _look(part, inner, found, depth - 1, tensors)


def is_own(value: object) -> bool:
    """True for an object with attributes whose class is the user's own: a cache of a stream, a counter."""
    cls = type(value)
    plain = isinstance(value, (type, nn.Module)) or callable(value) or not hasattr(value, "__dict__")
    return not plain and cls.__module__.partition(".")[0] not in _KNOWN


def is_packed(tensor: torch.Tensor) -> bool:
    """True if a tensor holds so many integers that it must be packed weights."""
    return not tensor.is_floating_point() and tensor.numel() > PACKED


def _copied(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and not is_packed(tensor) and tensor.nbytes < LARGE


def _holds_state(value: Any) -> bool:
    """True of dataclass instances, of the caches of transformers and their layers, and of the user's own objects."""
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    known = dataclasses.is_dataclass(value) or any(c.__module__ == CACHES for c in type(value).__mro__)
    return known or is_own(value)


def _restored(value: Any, before: Any, name: str) -> list[str]:
    """Put the content of a tensor or container back; return the names of what had been changed."""
    if isinstance(value, dict):
        if (
            len(value) == len(before)
            and all(map(is_, value, before))
            and all(map(is_, value.values(), before.values()))
        ):
            return []
        changed = [k for k in {**value, **before} if value.get(k, _restored) is not before.get(k, _restored)]
        value.update(before)  # it is never empty in between: it may be the attributes of a module
        for key in [key for key in value if key not in before]:
            del value[key]
        return [name or str(key) for key in changed]
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            if bool(((value == before) | (value.isnan() & before.isnan())).all()):
                return []
        with torch.inference_mode(value.is_inference()), torch.no_grad():
            value.copy_(before)
        return [name]
    if isinstance(value, torch.Generator):
        same = torch.equal(value.get_state(), before)
        value.set_state(before)
        return [] if same else [name]
    if isinstance(value, set):
        same = value == before
        value.intersection_update(before)
        value.update(before)
    else:
        same = len(value) == len(before) and all(a is b for a, b in zip(value, before, strict=True))
        if not same:
            value.clear()
            value.extend(before)
    return [] if same else [name]
