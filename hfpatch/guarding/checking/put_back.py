"""A model, its gradients and every random state, left as they were."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Generator

import numpy as np
import torch
from torch import nn

from hfpatch.compat.modules import scales_weights
from hfpatch.kept_state import state_as_before


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@contextlib.contextmanager
def as_before(model: nn.Module) -> Generator[None]:
    """Leave a model, its gradients and every random state as they were, whatever happens inside."""
    written = [p for m in model.modules() if scales_weights(m) for p in m.parameters()]
    values = {b: b.detach().clone() for b in written if not b.is_meta}
    grads = {p: p.grad for p in model.parameters()}
    cards = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    python, numbers = random.getstate(), np.random.get_state()
    try:
        for parameter in grads:
            parameter.grad = None
        with torch.random.fork_rng(devices=cards), state_as_before(model.modules()):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        for parameter, grad in grads.items():
            parameter.grad = grad
        with torch.no_grad():
            for tensor, value in values.items():
                tensor.copy_(value)
