"""One call of a model, kept by reference, and the state of the model for that call.

Keeping a call copies no argument tensor: it costs a walk over the arguments, and copies of the random states.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from hfpatch.compat.autograd import version
from hfpatch.compat.modules import buffers as buffers_of
from hfpatch.compat.modules import parameters
from hfpatch.tracing.calls import autocast_now, devices
from hfpatch.tracing.tensors import every


@dataclass(frozen=True)
class Random:
    """States of the generators that a model may draw from: torch's (GPUs by index), Python's and NumPy's."""

    cpu: torch.Tensor
    cuda: dict[int, torch.Tensor]
    python: tuple[Any, ...]
    numpy: Any

    @classmethod
    def now(cls, gpus: tuple[int, ...]) -> Random:
        """Return the current states.

        Args:
            gpus: Indices of the GPUs that the model is on.
        """
        # NumPy's legacy generator is the one that models draw from (SpecAugment)
        cuda = {gpu: torch.cuda.get_rng_state(gpu) for gpu in gpus}
        return cls(torch.get_rng_state(), cuda, random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Set the generators to these states; a GPU that does not exist here is ignored."""
        torch.set_rng_state(self.cpu)
        for gpu, state in self.cuda.items():
            if gpu < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, gpu)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        kind, keys, *rest = self.numpy
        return {
            "cpu": _text(self.cpu),
            "cuda": {str(gpu): _text(state) for gpu, state in self.cuda.items()},
            "python": [self.python[0], list(self.python[1]), self.python[2]],
            "numpy": [kind, base64.b64encode(keys.astype("<u4").tobytes()).decode(), *rest],
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Random:
        """Return the states of a dict that `to_dict` made."""
        kind, keys, *rest = saved["numpy"]
        return cls(
            _state(saved["cpu"]),
            {int(gpu): _state(state) for gpu, state in saved["cuda"].items()},
            (saved["python"][0], tuple(saved["python"][1]), saved["python"][2]),
            (kind, np.frombuffer(base64.b64decode(keys, validate=True), dtype="<u4"), *rest),
        )


@dataclass(frozen=True)
class Kept:
    """A call of the model.

    Attributes:
        args, kwargs: The arguments of its forward.
        random: Random states before the call.
        autocast: Autocast dtype by device type, where it was on around the call.
        training: True if the model was in training mode.
        versions: Tensors among the arguments, with how often each had been written to in place.
        otherwise: Paths of modules that were in the opposite mode; set only for calls from a bundle.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: Random
    autocast: dict[str, torch.dtype]
    training: bool
    versions: tuple[tuple[torch.Tensor, int], ...]
    otherwise: frozenset[str] = frozenset()

    @property
    def overwritten(self) -> bool:
        """True if an argument was written to in place since the call."""
        return any(version(tensor) != then for tensor, then in self.versions)


def keep(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], gpus: tuple[int, ...]) -> Kept:
    """Return a call that is about to be made, with the current random and autocast states."""
    versions = tuple((t, version(t)) for t in every((args, kwargs)))
    return Kept(args, dict(kwargs), Random.now(gpus), autocast_now(), model.training, versions)


@contextmanager
def as_it_was(model: nn.Module, call: Kept) -> Generator[None]:
    """Restore random states, autocast and training mode of a call, with gradients on; undo that on exit.

    Inside, each parameter that requires a gradient is replaced by a new leaf that shares its memory. On exit,
    parameters, gradients and buffers are as they were on entry.
    """
    gpus = tuple(call.random.cuda)
    now = Random.now(tuple(gpu for gpu in gpus if gpu < torch.cuda.device_count()))
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(m, dict(found)) for m in model.modules() if (found := buffers_of(m))]
    values = [
        (buffer, buffer.detach().clone())
        for _, held in buffers
        for buffer in held.values()
        if buffer is not None and buffer.device.type != "meta"
    ]
    try:
        with ExitStack() as stack:
            if model.training != call.training or call.otherwise:
                for path, module in model.named_modules():
                    module.training = call.training != (path in call.otherwise)
            call.random.restore()
            for device in devices():
                on = device in call.autocast
                stack.enter_context(torch.autocast(device, call.autocast.get(device), enabled=on, cache_enabled=False))
            stack.enter_context(_leaves(model))
            stack.enter_context(torch.enable_grad())
            yield
    finally:
        now.restore()
        for module, mode in modes:
            module.training = mode
        for module, held in buffers:
            own = buffers_of(module)
            own.clear()
            own.update(held)
        with torch.no_grad():
            for buffer, value in values:
                if not torch.equal(buffer, value):  # batch norm's kernels write without counting a version
                    buffer.copy_(value)


@contextmanager
def _leaves(model: nn.Module) -> Generator[None]:
    made: dict[int, nn.Parameter] = {}
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    grads = [(p, p.grad) for p in model.parameters()]
    try:
        for module in model.modules():
            for name, parameter in parameters(module).items():
                if parameter is None or not parameter.requires_grad:
                    continue
                places.append((module, name, parameter))
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(parameter.detach())
        for parameter, _ in grads:
            parameter.grad = None  # a module may also hold it elsewhere (an LSTM does)
        for module, name, parameter in places:
            parameters(module)[name] = made[id(parameter)]
        yield
    finally:
        for module, name, parameter in places:
            parameters(module)[name] = parameter
        for parameter, grad in grads:
            parameter.grad = grad


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
