"""A model, its gradients and every random state, left as they were."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Generator
from typing import Any

import numpy as np
import torch
from torch import nn

from hfpatch.compat.modules import scales_weights


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@contextlib.contextmanager
def as_before(model: nn.Module) -> Generator[None]:
    """Leave a model, its gradients and every random state as they were, whatever happens inside."""
    kept = [(m, dict(m.__dict__), _held(m)) for m in model.modules()]
    written = [p for m in model.modules() if scales_weights(m) for p in m.parameters()]
    values = {b: b.detach().clone() for b in (*model.buffers(), *written) if not b.is_meta}
    grads = {p: p.grad for p in model.parameters()}
    cards = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    python, numbers = random.getstate(), np.random.get_state()
    try:
        for parameter in grads:
            parameter.grad = None
        with torch.random.fork_rng(devices=cards):
            yield
    finally:
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
        with torch.no_grad():
            for tensor, value in values.items():
                tensor.copy_(value)


def _held(module: nn.Module) -> dict[str, Any]:
    """Return copies of what a module keeps in dicts, sets and lists: children, parameters, buffers, hooks."""
    return {n: v.copy() for n, v in module.__dict__.items() if isinstance(v, (dict, set, list))}


def _refill(container: Any, before: Any) -> None:
    """Give a container the content that it had."""
    container.clear()
    if isinstance(container, list):
        container.extend(before)
    else:
        container.update(before)
