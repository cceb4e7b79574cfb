"""One training step without its end: a forward and a backward pass on a batch, after which everything is as before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from hfpatch.compat import hooks
from hfpatch.compat.autograd import version
from hfpatch.errors import InputError
from hfpatch.guarding.checking.raised import Raised, check_keys, raised
from hfpatch.guarding.checks import clean_name
from hfpatch.model.put_back import as_before, device_of
from hfpatch.model.source import REJECTIONS
from hfpatch.numerics.autocast import autocast_as

DEEPEST = 32
"""Deepest nesting of a batch."""
FORWARD = 1 / 3
"""Share of a training step that its forward pass costs: a backward pass costs two of them."""


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
        written: Names of the embeddings whose output was written into in place.
        changed: Names of the parameters that forward itself wrote into, which are not put back.
        cost: What it cost, in training steps.
    """

    loss: float | None = None
    raised: Raised | None = None
    gradients: Mapping[str, torch.Tensor | None] = field(default_factory=dict[str, "torch.Tensor | None"])
    called: frozenset[str] = frozenset()
    backward: bool = False
    came_in: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    written: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    cost: float = FORWARD


class _Step(nn.Module):
    """A forward and a backward pass as one call, so that replaced parameters are still there when layers run again."""

    def __init__(self, model: nn.Module, run: Callable[[], Any]) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self) -> Any:
        return self.run()


def rehearse(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    batch: Mapping[str, Any],
    *,
    autocast: torch.dtype | None = None,
    reentrant: bool = False,
    prepare: Callable[[], object] = lambda: None,
    watch: Mapping[str, nn.Module] = MappingProxyType({}),
    embeddings: Mapping[str, nn.Module] = MappingProxyType({}),
    instead: Mapping[nn.Parameter, torch.Tensor] = MappingProxyType({}),
    compiled: bool = False,
) -> Rehearsal:
    """Run a forward and a backward pass, and put everything back.

    Back are: parameters and buffers (identity and values), `.grad`, modes, plain attributes of modules, and the random
    state of Python, NumPy and torch. Gradients are taken by `torch.autograd.grad`, so that no hook of an optimizer or a
    wrapper fires; under reentrant checkpointing, which torch does not allow there, by `backward()`.

    Args:
        model: What is called, inside DDP and the like. It is run in training mode.
        parameters: Those that are trained, by name.
        batch: Keyword arguments of the model; tensors in it are copied to the model's device.
        autocast: Dtype of an autocast region around the forward pass.
        reentrant: True if a layer is checkpointed by torch's reentrant implementation.
        prepare: Called before the forward pass, to change the model; that is put back too.
        watch: Modules whose first input is kept, by name.
        embeddings: Modules whose output is watched for writes in place, by name.
        instead: Tensors that the model computes with in place of parameters of its own, which are not written.
        compiled: True if a module of the model is compiled: all of it runs uncompiled.

    Raises:
        InputError: The batch has keys that the model does not take, or tensors without values.
    """
    device = device_of(model)
    called: set[int] = set()
    came_in: dict[str, torch.Tensor] = {}
    embedded: dict[str, tuple[torch.Tensor, int]] = {}
    began: list[bool] = []
    moved: dict[str, Any] = {}

    def mark(module: nn.Module, _args: Any) -> None:
        called.update(map(id, module.parameters(recurse=False)))

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            stream = args[0] if args else kwargs.get("hidden_states")
            if name not in came_in and isinstance(stream, torch.Tensor) and stream.dim() == 3:
                came_in[name] = stream[0].detach().float()

        return hook

    def embed(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                embedded.setdefault(name, (output, version(output)))

        return hook

    def passes() -> tuple[torch.Tensor | None, dict[str, torch.Tensor | None] | None]:
        with torch.enable_grad(), autocast_as(device.type, autocast):
            loss = loss_of(model(**moved))
        if loss is None or not loss.requires_grad:
            return loss, None
        began.append(True)
        # autograd goes only where something asked for lies: embeddings that a hook made require gradients are asked too
        ends = [t for t, _ in embedded.values() if t.requires_grad and t.is_leaf]
        return loss, _gradients(loss, parameters, ends, reentrant=reentrant)

    versions = {n: version(p) for n, p in model.named_parameters()}
    with torch.inference_mode(mode=False), uncompiled(compiled=compiled), as_before(model):
        moved.update({k: on_device(v, device, str(k)) for k, v in batch.items()})
        holders = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
        handles = [hooks.before(m, mark) for m in holders]
        handles += [hooks.before(m, keep(n), with_kwargs=True) for n, m in watch.items()]
        handles += [hooks.after(m, embed(n)) for n, m in embeddings.items()]
        try:
            model.train()
            prepare()
            loss, found = with_others(model, passes, instead)
        except REJECTIONS as error:
            check_keys(error, model, batch)
            places = {n: t for n, (t, _) in embedded.items()}
            return Rehearsal(raised=raised(error, model, places), cost=1.0 if began else FORWARD)
        finally:
            for handle in handles:
                handle.remove()
    names = frozenset(n for n, p in parameters.items() if id(p) in called)
    return Rehearsal(
        loss=None if loss is None else float(loss.detach()),
        gradients=found or dict.fromkeys(parameters),
        called=names,
        backward=found is not None,
        came_in=came_in,
        written=tuple(n for n, (t, before) in embedded.items() if version(t) != before),
        changed=tuple(clean_name(n) for n, p in model.named_parameters() if version(p) != versions[n]),
        cost=1.0 if began else FORWARD,
    )


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

    with as_before(model):
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


def on_device(value: Any, device: torch.device, name: str, depth: int = 0) -> Any:
    """Return a value of a batch with copies of its tensors on a device, as deep as a Trainer looks.

    Raises:
        InputError: A tensor is on meta, without values; or the batch is nested without end.
    """
    if depth > DEEPEST:
        raise InputError(f"check: batch: {name!r} is nested more than {DEEPEST} deep; pass tensors by name")
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            raise InputError(f"check: batch: {name!r} is on the meta device and has no values; pass it with values")
        return value.detach().to(device, copy=True).requires_grad_(value.requires_grad)
    if isinstance(value, Mapping):
        return {k: on_device(v, device, name, depth + 1) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(on_device(v, device, name, depth + 1) for v in value)
    return value


def uncompiled(*, compiled: bool) -> contextlib.AbstractContextManager[object]:
    """Have compiled modules run uncompiled: hooks that are set after their first call do nothing there."""
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


def with_others(model: nn.Module, passes: Callable[[], Any], instead: Mapping[nn.Parameter, torch.Tensor]) -> Any:
    """Run passes with other tensors in place of some parameters, also when layers run again in the backward pass."""
    if not instead:
        return passes()
    by_id = {id(p): t for p, t in instead.items()}
    named = model.named_parameters(remove_duplicate=False)
    return torch.func.functional_call(
        _Step(model, passes), {f"model.{n}": by_id[id(p)] for n, p in named if id(p) in by_id}, ()
    )


def _gradients(
    loss: torch.Tensor, parameters: Mapping[str, nn.Parameter], ends: list[torch.Tensor], *, reentrant: bool
) -> dict[str, torch.Tensor | None]:
    trained = [p for p in parameters.values() if p.requires_grad]
    if reentrant:
        loss.backward()
        return {n: p.grad for n, p in parameters.items()}
    found = torch.autograd.grad(loss, [*trained, *ends], allow_unused=True) if trained else ()
    by_id: dict[int, torch.Tensor | None] = dict(zip(map(id, trained), found, strict=False))
    # a function whose backward runs another one (reversible layers) leaves what that finds in `.grad`
    return {n: p.grad if (given := by_id.get(id(p))) is None else given for n, p in parameters.items()}


def loss_of(output: Any) -> torch.Tensor | None:
    """Return the loss in an output, as a tensor without dimensions; None without one."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    loss = output[0] if loss is None and isinstance(output, tuple) and output else loss
    loss = output if loss is None else loss
    return loss.reshape(()) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None
