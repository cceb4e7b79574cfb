"""One forward pass without gradients, in evaluation mode or in training mode without dropout, put back afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hfpatch.compat.operators import DispatchMode
from hfpatch.guarding.checking.rehearsal import loss_of, on_device, uncompiled, with_others
from hfpatch.model.put_back import as_before, device_of
from hfpatch.model.source import REJECTIONS
from hfpatch.numerics.autocast import autocast_as

NOISE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Difference of two outputs, over their size, that rounding makes at most; 0.05 in dtypes of 16 bits and below."""


@dataclass(frozen=True)
class Passed:
    """What one forward pass gave.

    Attributes:
        logits: The logits, or else the largest tensor of floats in the output, as float32; None if there is none, or
            if the model raised.
        loss: The loss; None if the output holds none.
        read: Ids of the parameters that operations read.
        drew: True if it drew random numbers.
        error: What it raised; None if it did not.
    """

    logits: torch.Tensor | None = None
    loss: float | None = None
    read: frozenset[int] = frozenset()
    drew: bool = False
    error: Exception | None = None

    @property
    def failed(self) -> str:
        """That it raised, as words; empty if it did not."""
        return (
            "" if self.error is None else f"a pass without gradients raised {type(self.error).__name__}: {self.error}"
        )


class _Reads(DispatchMode):
    """Notes which parameters operations read. Hooks would not do: with them torch's encoder layers call their parts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters = {id(p) for p in model.parameters()}
        self.read: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and note the parameters among its arguments."""
        for value in args:
            held = value if isinstance(value, (list, tuple)) else (value,)
            self.read.update(self.parameters.intersection(map(id, held)))
        return func(*args, **(kwargs or {}))


class WithoutDropout(TorchFunctionMode):
    """Inside, dropout of torch's functions and of attention drops nothing; modules stay in training mode."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, without its dropout."""
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            kwargs, args = _none_dropped(args, kwargs)
        if func is functional.multi_head_attention_forward:
            kwargs["training"] = False  # it is keyword-only in every call of torch's own, and means dropout alone
        return func(*args, **kwargs)


_DROPOUTS: tuple[Any, ...] = (
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d, functional.alpha_dropout,
    functional.feature_alpha_dropout, torch.dropout,
)  # fmt: skip


def _none_dropped(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Return the arguments of `scaled_dot_product_attention` with a dropout of 0."""
    place = 4  # query, key, value, attn_mask, dropout_p
    if len(args) > place:
        return kwargs, (*args[:place], 0.0, *args[place + 1 :])
    return {**kwargs, "dropout_p": 0.0}, args


def forward_pass(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    training: bool = False,
    autocast: torch.dtype | None = None,
    instead: Mapping[nn.Parameter, torch.Tensor] = MappingProxyType({}),
    within: contextlib.AbstractContextManager[object] | None = None,
    compiled: bool = False,
    seed: int = 0,
) -> Passed:
    """Run a forward pass without gradients, and put everything back, as `rehearse` does.

    Args:
        model: What is called.
        batch: Keyword arguments of the model; tensors in it are copied to the model's device.
        training: True for training mode, in which nothing is dropped; False for evaluation mode.
        autocast: Dtype of an autocast region around it.
        instead: Tensors that the model computes with in place of parameters of its own, which are not written.
        within: A context that changes the model for the pass.
        compiled: True if a module of the model is compiled: all of it runs uncompiled.
        seed: Of torch's random state during the pass.
    """
    device = device_of(model)
    reads = _Reads(model)
    whole = WithoutDropout() if training else contextlib.nullcontext()
    with torch.inference_mode(mode=False), uncompiled(compiled=compiled), as_before(model), torch.no_grad():
        given = {k: on_device(v, device, str(k)) for k, v in batch.items()}
        torch.manual_seed(seed)
        before = _random_state(device)
        try:
            model.train(training)
            with (
                within or contextlib.nullcontext(),
                autocast_as(device.type, autocast),
                whole,
                reads,
            ):
                output = with_others(model, lambda: model(**given), instead)
        except REJECTIONS as error:
            return Passed(error=error)
        drew = not all(map(torch.equal, before, _random_state(device)))
    loss = loss_of(output)
    return Passed(_logits(output), None if loss is None else float(loss), frozenset(reads.read), drew)


def _random_state(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _logits(output: Any) -> torch.Tensor | None:
    """Return the logits in an output, or else its largest tensor of floats; None without one."""
    held: Any = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(held, torch.Tensor):
        values: Any = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ()
        floats = [v for v in (*values, output) if isinstance(v, torch.Tensor) and v.is_floating_point() and v.dim() > 1]
        held = max(floats, key=torch.Tensor.numel, default=None)
    return None if held is None else held.detach().float()


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the RMS of the difference of two outputs of one shape over the RMS of the first; inf if not finite."""
    if not bool((one.isfinite() & other.isfinite()).all()):
        return float("inf")
    size = float(one.square().mean().sqrt())
    return float((one - other).square().mean().sqrt()) / size if size else float(bool((one != other).any()))


def rounding(model: nn.Module, autocast: torch.dtype | None) -> float:
    """Return the largest `apart` of a model's outputs that rounding makes."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} | ({autocast} if autocast else set())
    return max((NOISE.get(dtype, 0.05) for dtype in dtypes), default=0.05)
