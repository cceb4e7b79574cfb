"""The guard's errors and warnings before the first step."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn

from hfpatch.compat.optimizers import parameters_by_id
from hfpatch.compat.quantising.quantised import coded
from hfpatch.dtypes import dtype_name
from hfpatch.errors import InputError
from hfpatch.guarding.gradient_norms import is_distributed
from hfpatch.model import wrapping
from hfpatch.model.walk import peek

STRAY = "not the model's: parameter of the optimizer"
"""Prefix of the name of a parameter that the optimizer holds and the model does not."""


def trained_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the optimizer's parameters, by name: first those of the model in its order, then any others."""
    mine = parameters_by_id(optimizer)
    found = {clean_name(name): p for name, p in model.named_parameters() if id(p) in mine}
    known = {id(p) for p in found.values()}
    strays = {f"{STRAY} {i}": p for i, (key, p) in enumerate(mine.items()) if key not in known}
    return found | strays


def outside(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the model's parameters that require gradients and are not in the optimizer, by name."""
    mine = parameters_by_id(optimizer)
    return {clean_name(n): p for n, p in model.named_parameters() if p.requires_grad and id(p) not in mine}


def check(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, nn.Parameter],
    *,
    scaled: bool,
) -> tuple[str, ...]:
    """Raise if this combination cannot be guarded, and return warnings about it.

    Args:
        model: The model that is trained.
        optimizer: The torch optimizer, unwrapped.
        parameters: The result of `trained_parameters`.
        scaled: True if a GradScaler is used.

    Returns:
        The warnings, as sentences.

    Raises:
        InputError: The optimizer holds none of the model's parameters, or what FSDP2 gathered of them, or complex
            ones, or steps by a closure; sparse gradients; a wrapper the guard cannot see through; an eps that is 0 in
            its parameters' dtype; parameters under a GradScaler in a dtype it cannot unscale.
    """
    if all(name.startswith(STRAY) for name in parameters):
        raise InputError(
            f"guard: {type(optimizer).__name__} holds {len(parameters)} parameters, none of them of this "
            f"{type(model).__name__}, which would not be trained; create the optimizer from the model that is called, "
            "after it was copied, loaded or sharded"
        )
    if gathered := _gathered(model, parameters):
        raise InputError(
            f"guard: {type(optimizer).__name__} holds {len(gathered)} parameters as FSDP2 gathered them for a forward "
            f"pass (first: {gathered[0]}), so its steps would not reach the shards; create the optimizer before "
            "that pass, or after reshard() of each sharded module"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InputError(
            f"guard: {type(optimizer).__name__} calls the model again inside its step, where the guard cannot decide; "
            "use an optimizer that steps on gradients, such as AdamW"
        )
    for name, parameter in parameters.items():
        if parameter.is_complex():
            raise InputError(
                f"guard: {name} is {dtype_name(parameter.dtype)}, and gradients of complex numbers are not judged; "
                "train its real and imaginary parts (torch.view_as_real)"
            )
    mine = parameters_by_id(optimizer)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and id(module.weight) in mine:
            raise InputError(
                f"guard: {clean_name(name) or type(module).__name__} has sparse gradients (sparse=True), whose norm "
                "torch cannot compute; make it with sparse=False, or train it with a separate optimizer"
            )
        if type(module).__name__ in ("FullyShardedDataParallel", "DeepSpeedEngine"):
            raise InputError(
                f"guard: {type(module).__name__} keeps gradients in flat buffers, in which the guard cannot tell "
                "parameters and shards; use torch.distributed.fsdp.fully_shard, or DistributedDataParallel"
            )
    names = {id(p): n for n, p in parameters.items()}
    for number, eps, name, dtype in zero_eps(optimizer.param_groups, names):
        smallest = torch.finfo(dtype).smallest_normal
        raise InputError(
            f"guard: {type(optimizer).__name__} has eps={eps:g} in parameter group {number}, which is 0 in "
            f"{dtype} of {name}: after a small gradient {_then(optimizer)}, while the norm looks normal. Train these "
            f"parameters in float32, or set an eps of at least {smallest:g}"
        )
    if scaled:
        for name, parameter in parameters.items():
            if parameter.requires_grad and not can_unscale(parameter.device, parameter.dtype):
                dtype = dtype_name(parameter.dtype)
                raise InputError(
                    f"guard: {name} is {dtype} and trains under a GradScaler, which cannot unscale {dtype} gradients "
                    f"on {parameter.device.type}; keep trained parameters in float32 (parameter.data = "
                    "parameter.data.float(), or PEFT's autocast_adapter_dtype=True) and let autocast compute in float16"
                )
    return (*_outside(model, optimizer, parameters), *_warnings(model, scaled=scaled))


def _gathered(model: nn.Module, parameters: dict[str, nn.Parameter]) -> list[str]:
    """Return the parameters that FSDP2 gathered for a forward pass and that no backward pass made shards again."""
    sharded: list[Any] = [m for m in model.modules() if wrapping.kind_of(type(m)) == "FSDP2"]
    plain = {n: p for n, p in parameters.items() if not is_distributed(p)}
    if not sharded or not plain:
        return []
    for module in sharded:
        module.reshard()
    now = set(map(id, model.parameters()))
    return [name for name, parameter in plain.items() if not name.startswith(STRAY) and id(parameter) not in now]


def _then(optimizer: torch.optim.Optimizer) -> str:
    if any(group.get("fused") for group in optimizer.param_groups):
        return "a fused step is many times the learning rate"
    return "a step divides by 0 and the weights become non-finite"


def _outside(model: nn.Module, optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> Iterator[str]:
    name = type(optimizer).__name__
    if strays := [n for n in parameters if n.startswith(STRAY)]:
        yield (
            f"guard: {len(strays)} of {len(parameters)} parameters that {name} holds are not this "
            f"{type(model).__name__}'s (first: its parameter {strays[0].removeprefix(STRAY).strip()}); they are judged "
            "with the others. If they do not belong to a second model, create the optimizer after the model was "
            "copied, loaded or sharded"
        )
    mine = parameters_by_id(optimizer)
    if left := [clean_name(n) for n, p in model.named_parameters() if p.requires_grad and id(p) not in mine]:
        yield (
            f"guard: {len(left)} parameters of {type(model).__name__} require gradients and are not in {name} "
            f"({', '.join(left[:3])}{', ...' if len(left) > 3 else ''}): they are neither judged nor clipped here; "
            "set requires_grad_(False) on them, or guard their optimizer too (check_and_step after one backward)"
        )


def zero_eps(groups: Iterable[dict[str, Any]], names: dict[int, str]) -> Iterator[tuple[int, float, str, torch.dtype]]:
    """Yield parameter groups whose eps is 0 in the dtype of a parameter: index, eps, first such parameter, its dtype.

    Args:
        groups: The parameter groups of an optimizer.
        names: Names of the parameters, by id.
    """
    for number, group in enumerate(groups):
        eps: Any = group.get("eps")
        if not isinstance(eps, float) or eps == 0.0:
            continue  # a pair (Adafactor), none (SGD), or 0 set by the caller
        for parameter in group["params"]:
            if parameter.is_floating_point() and float(torch.tensor(eps, dtype=parameter.dtype, device="cpu")) == 0.0:
                yield number, eps, names[id(parameter)], parameter.dtype
                break


@cache
def can_unscale(device: torch.device, dtype: torch.dtype) -> bool:
    """True if a GradScaler can unscale gradients of a dtype on a device; tried with one number.

    float16 is never possible; bfloat16 is on the CPU, and on CUDA devices with some versions of torch.
    """
    if device.type == "meta" or dtype not in (torch.float16, torch.bfloat16):
        return True
    parameter = nn.Parameter(torch.zeros(1, device=device, dtype=dtype), requires_grad=True)
    parameter.grad = torch.zeros_like(parameter)
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale(torch.ones((), device=device, dtype=torch.float32))
    try:
        scaler.unscale_(torch.optim.SGD([parameter], lr=0.0))
    except (ValueError, RuntimeError):  # NotImplementedError is a RuntimeError
        return False
    return True


def quantised(model: nn.Module) -> tuple[list[str], list[str]]:
    """Return the names of quantised layers, and of those among them whose `compute_dtype` is float16."""
    layers = [(clean_name(n), m) for n, m in model.named_modules() if _is_quantised(m)]
    half = [n for n, m in layers if getattr(m, "compute_dtype", None) == torch.float16]
    return [n for n, _ in layers], half


def _warnings(model: nn.Module, *, scaled: bool) -> Iterator[str]:
    layers, half = quantised(model)
    if half:
        yield (
            f"guard: {len(half)} quantised layers compute in float16 ({half[0]} first), which overflows where "
            "bfloat16 does not; load with bnb_4bit_compute_dtype=torch.bfloat16, or torch.float32 if the GPU has no "
            "bfloat16"
        )
    elif layers and scaled:
        yield (
            f"guard: {len(layers)} quantised layers ({layers[0]} first) run under float16 autocast "
            "(a GradScaler is used), which overflows where bfloat16 does not; train with bf16=True, or without "
            "mixed precision and with bnb_4bit_compute_dtype=torch.float32"
        )


def _is_quantised(module: nn.Module) -> bool:
    weight: Any = peek(module, "weight")
    if weight is None:
        weight = peek(module, "qweight")
    plain = isinstance(weight, torch.Tensor) and not hasattr(weight, "quant_state") and weight.is_floating_point()
    return coded(module) is not None or (isinstance(weight, torch.Tensor) and not plain)


def clean_name(name: str) -> str:
    """Return a name without the prefixes that DDP, FSDP1, torch.compile and checkpointing add."""
    return wrapping.plain(name, "module")
