"""A model, its gradients and every random state, left as they were."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Generator
from contextvars import ContextVar

import numpy as np
import torch
from torch import nn

from hfpatch.compat.modules import buffers
from hfpatch.compat.rwkv import scales_weights
from hfpatch.model.kept_state import is_packed, state_as_before

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

    Back are `.grad`, the random states of Python, NumPy and torch, and all that `state_as_before` puts back. Inside,
    modules have copies of their buffers.
    """
    written = {p: p.detach().clone() for m in model.modules() if scales_weights(m) for p in m.parameters()}
    grads = {p: p.grad for p in model.parameters()}
    cards = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    python, numbers = random.getstate(), np.random.get_state()
    running = _RUNNING.get()
    try:
        _RUNNING.set(True)
        for parameter in grads:
            parameter.grad = None
        with torch.random.fork_rng(devices=cards), state_as_before(model.modules()):
            _copy_buffers(model)
            yield
    finally:
        _RUNNING.set(running)
        random.setstate(python)
        np.random.set_state(numbers)
        for parameter, grad in grads.items():
            parameter.grad = grad
        for parameter, value in written.items():
            if not parameter.is_meta and not torch.equal(parameter, value):
                parameter.data.copy_(value)  # autograd, which may have saved it, is not told


def _copy_buffers(model: nn.Module) -> None:
    """Give modules copies of their buffers: autograd, which may have saved them, forbids that they are written to."""
    copies: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        held = buffers(module)
        for name, buffer in held.items():
            if buffer is not None and not buffer.is_meta and not is_packed(buffer):
                if buffer not in copies:
                    copies[buffer] = buffer.detach().clone()
                held[name] = copies[buffer]
