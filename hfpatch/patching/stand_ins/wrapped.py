"""Tests whether a user's wrapper around a decoder layer passes on a float32 stream and computes the same with it.

A stand-in of the wrapper, with a layer that returns its input, runs alone on noise beyond float16's range: once in
float32, and once with its own weights and the casts that the patch would set.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hfpatch.compat import hooks
from hfpatch.compat.sharding import narrows_stream
from hfpatch.dtypes import dtype_name
from hfpatch.model.evaluating.full_float32 import full_float32
from hfpatch.model.norms import is_norm, is_torch_norm
from hfpatch.model.roles import Place, Stack, own_class
from hfpatch.patching.kinds.cast_input import CastInput
from hfpatch.patching.kinds.compute_in_float32 import ComputeInFloat32
from hfpatch.patching.kinds.dtype_rule import DtypeRule
from hfpatch.patching.stand_ins.stand_in import StandIns, Through

PEAK = 1e5
"""Largest absolute value of the test stream: beyond float16, as in the models that need the patch."""

TOLERANCE = 6e-3
"""Largest allowed relative L2 distance from float32."""


def computes_in_float32(module: nn.Module) -> bool:
    """True if a part of a wrapper can read a float32 stream with half-precision weights: torch's linear and norms."""
    return isinstance(module, nn.Linear) or (is_norm(module) and is_torch_norm(module))


def wants_cast(module: nn.Module) -> bool:
    """True if the input of a part of a wrapper must be cast to the dtype of its weights."""
    return not computes_in_float32(module) and not is_norm(module)


def obstacle(stacks: Sequence[Stack], compute_dtype: torch.dtype | None) -> str:
    """Return why a wrapper around the decoder layers, or FSDP, does not work with a float32 stream; empty if all do."""
    on_stream = (place for stack in stacks for place in (*stack.items, *stack.layers))
    if sharded := next((f"{path}: {why}" for path, module in on_stream if (why := narrows_stream(module))), ""):
        return sharded
    tried: set[Any] = set()
    for stack in stacks:
        for place, layer in stack.wrappers:
            key = type(place[1]), type(layer[1]), *((n, p.shape, p.dtype) for n, p in place[1].named_parameters())
            if key not in tried and (why := _fails(place, layer, stack, compute_dtype)):
                return f"{place[0]} is a {own_class(place[1]).__name__} around the decoder layer: {why}"
            tried.add(key)
    return ""


def _fails(place: Place, layer: Place, stack: Stack, compute_dtype: torch.dtype | None) -> str:
    wrapper, inner = place[1], layer[1]
    if any(p.is_meta for p in _own(wrapper, inner)):
        return "its weights are not loaded, or offloaded, so it cannot be tested with a float32 stream"
    if any(hasattr(p, "device_mesh") for p in _own(wrapper, inner)):
        return "its weights are sharded, so it cannot be tested with a float32 stream: patch the model before sharding"
    width = next(p.shape[-1] for _, norm in stack.layer_norms for p in norm.parameters())
    draw = torch.Generator().manual_seed(0)
    stream = torch.randn(2, 5, width, generator=draw, device="cpu", dtype=torch.float32)
    stream = stream * (PEAK / stream.abs().max())
    failures: list[str] = []
    for tail in (None, (), (None,)):  # a layer returns a tensor or a tuple that begins with it, by architecture
        exact, failure = _run(wrapper, inner, stream, tail, float32=True, dtype=None)
        if exact is None or exact.shape != stream.shape:
            shape = tuple(exact.shape) if exact is not None else ""
            failures.append(failure or f"it returns a tensor {shape}, not the stream {tuple(stream.shape)}")
            continue
        if exact.dtype != torch.float32:
            return f"it passes the stream on in {dtype_name(exact.dtype)}, not in float32"
        mine, failure = _run(wrapper, inner, stream, tail, float32=False, dtype=compute_dtype)
        if mine is None:
            return f"with a float32 stream and weights in half precision its forward raises {failure}"
        if mine.dtype != torch.float32:
            return f"it passes the stream on in {dtype_name(mine.dtype)}, not in float32"
        if not mine.isfinite().all():
            return "a part of it reads the stream in float16, where a value above 65,504 is inf"
        error = float((mine - exact).norm() / exact.norm())
        return "" if error < TOLERANCE else f"a float32 stream changes its output (relative error {error:.1e})"
    return f"it cannot be run alone, so it was not tested with a float32 stream ({failures[0]})"


def _own(wrapper: nn.Module, inner: nn.Module) -> Iterator[torch.Tensor]:
    held = {id(p) for p in inner.parameters()}
    return (p for p in wrapper.parameters() if id(p) not in held)


def _run(
    wrapper: nn.Module,
    inner: nn.Module,
    stream: torch.Tensor,
    tail: tuple[None, ...] | None,
    *,
    float32: bool,
    dtype: torch.dtype | None,
) -> tuple[torch.Tensor | None, str]:
    """Run a stand-in on the CPU; return (its output, "") or (None, the reason)."""

    def as_layers_do(_module: nn.Module, _args: object, out: torch.Tensor) -> object:
        return out if tail is None else (out, *tail)

    made = StandIns()
    # Exception: a user's forward may raise anything
    with (
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
        full_float32(),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            copied = made.of(wrapper).cpu()
            if float32 or dtype is not None:
                copied = copied.to(torch.float32 if float32 else dtype)
            through = made.modules[id(inner)]
            _as_the_layer(through, inner)
            hooks.after(through, as_layers_do)
            for module in () if float32 else copied.modules():
                if isinstance(module, Through) or next(module.parameters(recurse=False), None) is None:
                    continue
                if computes_in_float32(module):
                    hooks.before(module, ComputeInFloat32(), with_kwargs=True)
                elif wants_cast(module) and module is not copied:
                    rule = DtypeRule(next(module.parameters(recurse=False)).dtype)
                    hooks.before(module, CastInput(rule), with_kwargs=True)
            out = copied(stream.clone(), **_required(wrapper))
        except Exception as error:  # noqa: BLE001
            return None, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    return (first, "") if isinstance(first, torch.Tensor) else (None, f"it returns a {type(first).__name__}")


def _as_the_layer(through: nn.Module, inner: nn.Module) -> None:
    """Copy the plain attributes of a layer, which a wrapper may read, to the module that stands for it."""
    for name, value in vars(inner).items():
        if not name.startswith("_") and name != "forward":
            through.__dict__.setdefault(name, value)


def _required(wrapper: nn.Module) -> dict[str, None]:
    """Return None for each required argument of a wrapper after the stream: it passes them on to the layer."""
    parameters = list(inspect.signature(wrapper.forward).parameters.values())
    named = (p for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return {p.name: None for p in named if p.default is p.empty}
