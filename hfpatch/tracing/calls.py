"""One call of a module, kept so that it can be made again as it was.

The call keeps references to its arguments, no copies: in training autograd holds them anyway. What was overwritten
since is noticed by its version.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from hfpatch.compat.autograd import version
from hfpatch.tracing.tensors import is_cache


@dataclass
class Call:
    """A call of one module in a traced step.

    Attributes:
        path: Of the module, from the traced model.
        number: How often it had been called before in this step.
        args, kwargs: As its forward got them.
        caches: Key-value caches as they were when the step first met them (`snapshot`), by id: layers add to them.
        grads: Gradients of its outputs by name, as the backward pass brought them.
        versions: Floating-point tensors among its arguments, each with its version then.
        inputs: Events of those tensors (`Event.index`).
    """

    path: str
    module: nn.Module
    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    caches: dict[int, tuple[Any, Any]]
    versions: list[tuple[torch.Tensor, int]]
    inputs: list[int] = field(default_factory=list[int])
    grads: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    def __post_init__(self) -> None:
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = autocast_now()
        self.random = _Random(self.versions[0][0].device if self.versions else None) if self.module.training else None

    @property
    def overwritten(self) -> bool:
        """Whether an argument was changed in place since."""
        return any(version(tensor) != then for tensor, then in self.versions)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Its arguments, with the caches as they were."""
        args = tuple(_as_kept(value, self.caches) for value in self.args)
        return args, {name: _as_kept(value, self.caches) for name, value in self.kwargs.items()}

    @contextmanager
    def as_it_was(self) -> Generator[None]:
        """Autocast and random numbers as they were, no gradient checkpointing; afterwards all is as before."""
        checkpointed = [m for m in self.module.modules() if m.__dict__.get("gradient_checkpointing") is True]
        buffers = [(b, b.detach().clone()) for b in self.module.buffers() if b.device.type != "meta"]
        now = [_Random(None), *([_Random(torch.device("cuda"))] if torch.cuda.is_initialized() else [])]
        before = {device: _autocast(device) for device in devices()}
        try:
            for module in checkpointed:
                module.__dict__["gradient_checkpointing"] = False
            if self.random is not None:
                self.random.restore()
            for device in before:
                torch.set_autocast_enabled(device, device in self.autocast)
                if device in self.autocast:
                    torch.set_autocast_dtype(device, self.autocast[device])
            torch.clear_autocast_cache()  # casts of weights are operations too
            yield
        finally:
            for module in checkpointed:
                module.__dict__["gradient_checkpointing"] = True
            for device, (enabled, dtype) in before.items():
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
            torch.clear_autocast_cache()
            for random in now:
                random.restore()
            with torch.no_grad():
                for buffer, value in buffers:
                    if not torch.equal(buffer, value):  # batch norm writes without raising the version
                        buffer.copy_(value)


def snapshot(values: Any, kept: dict[int, tuple[Any, Any]]) -> None:
    """Remember the caches among arguments, once each: layers write to them."""
    for value in values:
        if is_cache(value) and id(value) not in kept:
            kept[id(value)] = (value, _shallow(value))


def _shallow(cache: Any) -> Any:
    out = copy.copy(cache)
    for name, value in vars(cache).items():
        if name == "layers":
            out.layers = [copy.copy(layer) for layer in value]
        elif is_cache(value):  # one for the decoder itself and one for what it reads of the encoder
            setattr(out, name, _shallow(value))
    return out


def _as_kept(value: Any, kept: dict[int, tuple[Any, Any]]) -> Any:
    return _shallow(kept[id(value)][1]) if id(value) in kept else value


@cache
def devices() -> tuple[str, ...]:
    """Types of device that are here."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def autocast_now() -> dict[str, torch.dtype]:
    """Where autocast is on: dtype by device type."""
    return {d: torch.get_autocast_dtype(d) for d in devices() if torch.is_autocast_enabled(d)}


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


class _Random:
    """State of the generator that a device's random numbers come from."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        if device is not None and device.type == "cuda":  # its whole state is a seed and a counter, and cheap so
            generator = _generator(device)
            self.state: Any = (generator.initial_seed(), generator.get_offset())
        else:
            self.state = torch.get_rng_state()

    def restore(self) -> None:
        """Go back to it."""
        if self.device is not None and self.device.type == "cuda":
            generator = _generator(self.device)
            generator.manual_seed(self.state[0])
            generator.set_offset(self.state[1])
        else:
            torch.set_rng_state(self.state)


def _generator(device: torch.device) -> Any:
    return torch.cuda.default_generators[torch.empty(0, device=device).get_device()]
