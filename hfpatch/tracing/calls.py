"""One call of a module, kept to be run again under the same conditions.

The call keeps references to its arguments, not copies: in training autograd holds them anyway. An argument that was
overwritten since is detected by its version.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from hfpatch.compat.autograd import version
from hfpatch.compat.modules import parameters
from hfpatch.model.kept_state import state_as_before
from hfpatch.tracing.tensors import is_cache


@dataclass
class Call:
    """A call of one module in a traced step.

    Attributes:
        path: Path of the module in the traced model.
        number: Calls of the module before this one, in this step.
        args, kwargs: The arguments of its forward.
        caches: Key-value caches as they were when the step first saw them (`snapshot`), by id: layers write to them.
        versions: Floating-point tensors among its arguments, each with its version at the call.
        inputs: Events of those tensors (`Event.index`).
        grads: Gradients of its outputs, by name.
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
        self.grad = torch.is_grad_enabled()
        self.autocast = autocast_now()
        self.random = _Random(self._device()) if self.module.training else None

    def _device(self) -> torch.device | None:
        """Return the device that its random numbers are drawn on."""
        if self.versions:
            return self.versions[0][0].device
        return next((p.device for p in self.module.parameters()), None)  # it is given token ids only

    @property
    def overwritten(self) -> bool:
        """True if an argument was changed in place since the call."""
        return any(version(tensor) != then for tensor, then in self.versions)

    @property
    def used_up(self) -> str | None:
        """Name of the first argument that is an iterator, such as a generator; None if there is none."""
        given = {**{str(i): value for i, value in enumerate(self.args)}, **self.kwargs}
        return next((name for name, value in given.items() if isinstance(value, Iterator)), None)

    @property
    def training(self) -> bool:
        """True if the module was in training mode."""
        return self.random is not None

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return its arguments, with copies of the caches as they were; a static cache is written to in place."""
        args = tuple(_as_kept(value, self.caches) for value in self.args)
        return args, {name: _as_kept(value, self.caches) for name, value in self.kwargs.items()}

    @contextmanager
    def as_it_was(self, *passed: Any) -> Generator[list[str]]:
        """Restore the autocast and random state of the call, without gradient checkpointing.

        On exit, autocast, random states, attributes and buffers are put back as they were on entry, whatever is raised.

        Args:
            passed: The arguments that the module will be run with; caches and containers in them are put back too.

        Returns:
            A list of names, empty until the context ends: what the run changed, see `state_as_before`.
        """
        checkpointed = [m for m in self.module.modules() if m.__dict__.get("gradient_checkpointing") is True]
        now = [
            _Random(None),
            *([_Random(torch.device("cuda", torch.cuda.current_device()))] if torch.cuda.is_initialized() else []),
        ]
        python, numbers = random.getstate(), np.random.get_state()
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
            torch.clear_autocast_cache()  # so that casts of weights are run, and watched, again
            with state_as_before(self.module.modules(), passed) as changed:
                yield changed
        finally:
            for module in checkpointed:
                module.__dict__["gradient_checkpointing"] = True
            for device, (enabled, dtype) in before.items():
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
            torch.clear_autocast_cache()
            for state in now:
                state.restore()
            random.setstate(python)
            np.random.set_state(numbers)


@dataclass(frozen=True)
class Kept:
    """The calls of a traced step, kept until the step has been diagnosed.

    Attributes:
        calls: By path of the module and number of its calls before this one.
        changed: What was changed since, so that no call is what it was; empty if nothing was.
    """

    calls: Mapping[tuple[str, int], Call]
    changed: str


def changed(
    given: Iterable[tuple[torch.Tensor, int]],
    owners: Iterable[tuple[str, nn.Module]],
    measured: Mapping[int, tuple[object, int]],
) -> str:
    """Return what was changed since a step was run; empty if nothing was.

    Args:
        given: Tensors among the arguments of the model, each with its version then.
        owners: Modules that hold parameters, by path.
        measured: The tensors that were measured, by id, each with its version then.
    """
    if any(version(tensor) != then for tensor, then in given):
        return "an argument was overwritten after the call"
    for path, module in owners:
        for name, parameter in parameters(module).items():
            known = None if parameter is None else measured.get(id(parameter))
            if parameter is not None and known is not None and known[1] != version(parameter):
                return f"the weights were changed after the call ({path}.{name} first)"
    return ""


def snapshot(values: Any, kept: dict[int, tuple[Any, Any]]) -> None:
    """Add shallow copies of the caches among arguments to `kept`, once for each cache: layers write to them."""
    for value in values:
        if is_cache(value) and id(value) not in kept:
            kept[id(value)] = (value, _shallow(value))


def _shallow(cache: Any, *, cloned: bool = False) -> Any:
    """Return a copy of a cache whose layers share its keys and values; with `cloned`, none of its tensors.

    Tensors of one element are always cloned: a static cache counts its tokens in one, in place.
    """
    out = copy.copy(cache)
    for name, value in vars(cache).items():
        if name == "layers":
            out.layers = [copy.copy(layer) for layer in value]
            for layer in out.layers:
                for slot, tensor in vars(layer).items():
                    if isinstance(tensor, torch.Tensor) and (cloned or tensor.numel() == 1):
                        setattr(layer, slot, tensor.clone())
                if cloned:
                    _clear_unwritten(layer)
        elif type(value) is dict:  # which layers of cross-attention were filled
            setattr(out, name, dict(value))  # pyright: ignore[reportUnknownArgumentType]
        elif is_cache(value):  # an encoder-decoder cache has one for self-attention and one for cross-attention
            setattr(out, name, _shallow(value, cloned=cloned))
    return out


def _clear_unwritten(layer: Any) -> None:
    """Set to 0, as before the call, what a static layer holds beyond the tokens that it had counted."""
    count = getattr(layer, "cumulative_length", None)
    for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
        if isinstance(count, torch.Tensor) and count.numel() == 1 and isinstance(tensor, torch.Tensor):
            tensor[..., int(count) :, :] = 0


def _as_kept(value: Any, kept: dict[int, tuple[Any, Any]]) -> Any:
    return _shallow(kept[id(value)][1], cloned=True) if id(value) in kept else value


@cache
def devices() -> tuple[str, ...]:
    """Return the device types available here."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def autocast_now() -> dict[str, torch.dtype]:
    """Return the autocast dtype by device type, for the devices on which autocast is on."""
    return {d: torch.get_autocast_dtype(d) for d in devices() if torch.is_autocast_enabled(d)}


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


class _Random:
    """The state of a device's random number generator."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        if device is not None and device.type == "cuda":  # seed and offset are its whole state, and cheap to read
            generator = _generator(device)
            self.state: Any = (generator.initial_seed(), generator.get_offset())
        else:
            self.state = torch.get_rng_state()

    def restore(self) -> None:
        """Set the generator to this state."""
        if self.device is not None and self.device.type == "cuda":
            generator = _generator(self.device)
            generator.manual_seed(self.state[0])
            generator.set_offset(self.state[1])
        else:
            torch.set_rng_state(self.state)


def _generator(device: torch.device) -> Any:
    return torch.cuda.default_generators[device.index]
