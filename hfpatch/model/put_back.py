"""A model, its gradients and every random state, left as they were."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from hfpatch.compat.modules import buffers, scales_weights

DEPTH = 4
"""Deepest nesting of containers in a module whose content is kept."""
LARGE = 2**28
"""Bytes from which a tensor that is no buffer is not copied: a data set that hangs on a module, not its state."""
PACKED = 2**20
"""Elements from which an integer buffer is left in place: packed weights, which no forward writes to."""
_KNOWN = frozenset({"torch", "transformers", "peft", "accelerate", "hfpatch", "numpy", *sys.stdlib_module_names})
_REGISTRIES = frozenset(nn.Module().__dict__)
_RUNNING: ContextVar[bool] = ContextVar("hfpatch_on_trial", default=False)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def on_trial() -> bool:
    """True inside `as_before`: what is run now is no call of the user's."""
    return _RUNNING.get()


@contextlib.contextmanager
def as_before(model: nn.Module) -> Generator[None]:
    """Leave a model, its gradients and every random state as they were, whatever happens inside.

    Back are: parameters and buffers (inside, modules have copies of their buffers), `.grad`, modes, attributes and
    hooks of modules, with the content of containers, tensors and objects of the user's own classes in them, and the
    random states of Python, NumPy and torch.
    """
    kept = [(m, dict(m.__dict__), _held(m)) for m in model.modules()]
    inner = list(_inner(model))
    written = [p for m in model.modules() if scales_weights(m) for p in m.parameters()]
    values = [partial(_write, p, p.detach().clone()) for p in written if not p.is_meta]
    grads = {p: p.grad for p in model.parameters()}
    cards = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    python, numbers = random.getstate(), np.random.get_state()
    running = _RUNNING.get()
    try:
        _RUNNING.set(True)
        for parameter in grads:
            parameter.grad = None
        _copy_buffers(model)
        with torch.random.fork_rng(devices=cards):
            yield
    finally:
        _RUNNING.set(running)
        random.setstate(python)
        np.random.set_state(numbers)
        for module, attributes, containers in kept:
            for name in [n for n in module.__dict__ if n not in attributes]:
                del module.__dict__[name]
            module.__dict__.update(attributes)
            for name, before in containers.items():
                _refill(attributes[name], before)
        for parameter, grad in grads.items():
            parameter.grad = grad
        for put_back in (*inner, *values):
            put_back()


def is_own(value: object) -> bool:
    """True for an object with attributes whose class is the user's own: a cache of a stream, a counter."""
    cls = type(value)
    plain = isinstance(value, (type, nn.Module)) or callable(value) or not hasattr(value, "__dict__")
    return not plain and cls.__module__.partition(".")[0] not in _KNOWN


def _copy_buffers(model: nn.Module) -> None:
    """Give modules copies of their buffers: autograd, which may have saved them, forbids that they are written to."""
    copies: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        held = buffers(module)
        for name, buffer in held.items():
            packed = buffer is not None and not buffer.is_floating_point() and buffer.numel() > PACKED
            if buffer is not None and not buffer.is_meta and not packed:
                if buffer not in copies:
                    copies[buffer] = buffer.detach().clone()
                held[name] = copies[buffer]


def _held(module: nn.Module) -> dict[str, Any]:
    """Return copies of what a module keeps in dicts, sets and lists: children, parameters, buffers, hooks."""
    return {n: v.copy() for n, v in module.__dict__.items() if isinstance(v, (dict, set, list))}


def _inner(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Yield functions that put back what lies inside the attributes of modules."""
    seen: dict[int, Any] = {}
    for module in model.modules():
        for name, value in module.__dict__.items():
            if name not in _REGISTRIES:
                yield from _kept(value, DEPTH, seen)


def _kept(value: Any, depth: int, seen: dict[int, Any], *, objects: bool = True) -> Iterator[Callable[[], None]]:
    """Yield functions that put back a tensor, or what a container or an object holds; not objects inside objects."""
    if depth == 0 or isinstance(value, (str, bytes, int, float, nn.Parameter)) or id(value) in seen:
        return
    seen[id(value)] = value
    parts: tuple[Any, ...] = ()
    if isinstance(value, torch.Tensor):
        if not value.is_meta and value.nbytes < LARGE:
            yield partial(_write, value, value.detach().clone())
    elif isinstance(value, (dict, list, set, deque)):
        yield partial(_refill, value, copy.copy(value))  # pyright: ignore[reportUnknownArgumentType]
        parts = tuple(value.values() if isinstance(value, dict) else value)  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(value, tuple):
        parts = value
    elif objects and is_own(value):
        objects = False
        yield partial(_refill, vars(value), dict(vars(value)))
        parts = tuple(vars(value).values())
    for part in parts:
        yield from _kept(part, depth - 1, seen, objects=objects)


def _refill(container: Any, before: Any) -> None:
    """Give a container the content that it had."""
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(before)
    else:
        container.update(before)


def _write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor the values that it had, if it has others; autograd, which may have saved it, is not told."""
    if not torch.equal(tensor, value):
        tensor.data.copy_(value)
