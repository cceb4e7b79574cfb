"""One training step without its end: a forward and a backward pass on a batch, after which everything is as before."""

from __future__ import annotations

import contextlib
import random
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from hfpatch.compat import hooks
from hfpatch.dtypes import dtype_name
from hfpatch.errors import InputError
from hfpatch.guarding.checks import clean_name
from hfpatch.model.source import REJECTIONS


@dataclass(frozen=True)
class Raised:
    """A step that ended in an error.

    Attributes:
        error: Class and text of the error.
        path: The innermost module whose code was running; empty for the model itself.
        cls: Name of its class.
        held: Dtypes and shapes of the tensors in its call, by name.
        weight: Dtype of the module's own weight; None if it has none.
    """

    error: str
    path: str
    cls: str
    held: Mapping[str, str]
    weight: torch.dtype | None


@dataclass(frozen=True)
class Rehearsal:
    """What one forward and backward pass gave.

    Attributes:
        loss: The model's own loss; None if it gave none, or raised before.
        raised: The error that ended it; None if none did.
        gradients: One per trained parameter, by name; None where backward gave none.
        called: Names of the trained parameters whose module was called.
        backward: True if a backward pass was run.
        came_in: The first row [positions, width] of the tensor that came into each watched module, by name.
    """

    loss: float | None = None
    raised: Raised | None = None
    gradients: Mapping[str, torch.Tensor | None] = field(default_factory=dict[str, "torch.Tensor | None"])
    called: frozenset[str] = frozenset()
    backward: bool = False
    came_in: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])


def rehearse(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    batch: Mapping[str, Any],
    *,
    autocast: torch.dtype | None = None,
    reentrant: bool = False,
    prepare: Callable[[], object] = lambda: None,
    watch: Mapping[str, nn.Module] = MappingProxyType({}),
) -> Rehearsal:
    """Run a forward and a backward pass, and put everything back.

    Back are: parameters and buffers (identity and values), `.grad`, modes, plain attributes of modules, and the random
    state of Python, NumPy and torch. Gradients are taken by `torch.autograd.grad`, so that no hook of an optimizer or a
    wrapper fires; under reentrant checkpointing, which torch does not allow there, by `backward()`.

    Args:
        model: What is called, inside DDP and the like. It is run in training mode.
        parameters: Those that are trained, by name.
        batch: Keyword arguments of the model; tensors are moved to its device.
        autocast: Dtype of an autocast region around the forward pass.
        reentrant: True if a layer is checkpointed by torch's reentrant implementation.
        prepare: Called before the forward pass, to change the model; that is put back too.
        watch: Modules whose first input is kept, by name.

    Raises:
        InputError: The batch has keys that the model does not take.
    """
    device = device_of(model)
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    called: set[int] = set()
    came_in: dict[str, torch.Tensor] = {}

    def mark(module: nn.Module, _args: Any) -> None:
        called.update(map(id, module.parameters(recurse=False)))

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            stream = args[0] if args else kwargs.get("hidden_states")
            if name not in came_in and isinstance(stream, torch.Tensor) and stream.dim() == 3:
                came_in[name] = stream[0].detach().float()

        return hook

    region = torch.autocast(device.type, dtype=autocast) if autocast is not None else contextlib.nullcontext()
    with as_before(model, device):
        holders = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
        handles = [hooks.before(m, mark) for m in holders]
        handles += [hooks.before(m, keep(n), with_kwargs=True) for n, m in watch.items()]
        try:
            model.train()
            prepare()
            with torch.enable_grad(), region:
                loss = _loss(model(**moved))
            found = None
            if loss is not None and loss.requires_grad:
                found = _gradients(loss, parameters, reentrant=reentrant)
        except REJECTIONS as error:
            _check_keys(error, model, batch)
            return Rehearsal(raised=_raised(error, model))
        finally:
            for handle in handles:
                handle.remove()
    names = frozenset(n for n, p in parameters.items() if id(p) in called)
    value = None if loss is None else float(loss.detach())
    return Rehearsal(value, None, found or dict.fromkeys(parameters), names, found is not None, came_in)


class _Reached(Exception):  # noqa: N818 - no fault: the layer was called
    pass


def stream_into(model: nn.Module, layer: nn.Module, ids: torch.Tensor) -> torch.Tensor | None:
    """Return what comes into a layer of a language model that is called on token ids; None if it cannot be.

    Args:
        model: The language model.
        layer: Its first layer, where the run ends.
        ids: [1, positions].

    Returns:
        [positions, width], in float32.
    """
    device = device_of(model)
    found: list[torch.Tensor] = []

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stream = args[0] if args else kwargs.get("hidden_states")
        if isinstance(stream, torch.Tensor) and stream.dim() == 3:
            found.append(stream[0].detach().float())
        raise _Reached

    with as_before(model, device):
        handle = hooks.before(layer, hook, with_kwargs=True)
        try:
            model.eval()
            with torch.no_grad():
                model(input_ids=ids.to(device))
        except (_Reached, *REJECTIONS):
            pass
        finally:
            handle.remove()
    return found[0] if found else None


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@contextlib.contextmanager
def as_before(model: nn.Module, device: torch.device) -> Generator[None]:
    """Leave a model, its gradients and every random state as they were, whatever happens inside."""
    kept = [(m, dict(m.__dict__), _tables(m)) for m in model.modules()]
    values = {b: b.detach().clone() for b in model.buffers() if not b.is_meta}
    grads = {p: p.grad for p in model.parameters()}
    for parameter in grads:
        parameter.grad = None
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        for module, attributes, tables in kept:
            for name in [n for n in module.__dict__ if n not in attributes]:
                del module.__dict__[name]
            module.__dict__.update(attributes)
            for name, held in tables.items():
                table = attributes[name]
                table.clear()
                table.update(held)
        for parameter, grad in grads.items():
            parameter.grad = grad
        with torch.no_grad():
            for buffer, value in values.items():
                buffer.copy_(value)


def _tables(module: nn.Module) -> dict[str, Any]:
    """Return copies of what a module keeps in dicts and sets: children, parameters, buffers, hooks."""
    return {n: v.copy() for n, v in module.__dict__.items() if isinstance(v, (dict, set))}


def _gradients(
    loss: torch.Tensor, parameters: Mapping[str, nn.Parameter], *, reentrant: bool
) -> dict[str, torch.Tensor | None]:
    trained = [p for p in parameters.values() if p.requires_grad]
    if reentrant:
        loss.backward()
        return {n: p.grad for n, p in parameters.items()}
    found = torch.autograd.grad(loss, trained, allow_unused=True) if trained else ()
    by_id = {id(p): g for p, g in zip(trained, found, strict=True)}
    return {n: by_id.get(id(p)) for n, p in parameters.items()}


def _loss(output: Any) -> torch.Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    loss = output[0] if loss is None and isinstance(output, tuple) and output else loss
    loss = output if loss is None else loss
    return loss.reshape(()) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def _check_keys(error: BaseException, model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Raise if the batch, not the model, is at fault: its keys do not fit the signature of forward."""
    inside = [f for f, _ in traceback.walk_tb(error.__traceback__) if f.f_locals.get("self") is model]
    if isinstance(error, TypeError) and not any(f.f_code.co_name == "forward" for f in inside):
        raise InputError(
            f"check: {type(model).__name__} does not take this batch ({', '.join(map(str, batch))}): {error}; pass "
            "the keys that its forward names, or leave batch= out"
        ) from error


def _raised(error: BaseException, model: nn.Module) -> Raised:
    """Return the innermost module of the model that was running, from the frames of the traceback."""
    paths = {id(m): clean_name(n) for n, m in model.named_modules()}
    place: nn.Module = model
    held: dict[str, str] = {}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(owner, nn.Module) and id(owner) in paths:
            place, held = owner, dict(_tensors(frame.f_locals))
    weight = dict(place.named_parameters(recurse=False)).get("weight")
    return Raised(
        error=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}".rstrip(
            ": "
        ),
        path=paths[id(place)],
        cls=type(place).__name__,
        held=held,
        weight=None if weight is None else weight.dtype,
    )


def _tensors(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            yield name, f"{dtype_name(value.dtype)} {tuple(value.shape)}"
