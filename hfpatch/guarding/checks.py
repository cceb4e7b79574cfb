"""What the guard refuses, or warns about, before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn

from hfpatch.errors import InputError

WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Parameters whose gradients are judged: the optimizer's, and others of the model that train, in model order."""
    held: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if held.pop(id(parameter), None) is not None or parameter.requires_grad:
            found[plain(name)] = parameter
    for i, parameter in enumerate(held.values()):
        found[f"parameter {i} of the optimizer that is not the model's"] = parameter
    return found


def check(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, nn.Parameter],
    *,
    scaled: bool,
) -> tuple[str, ...]:
    """Refuse what cannot train, and return warnings about what may not.

    Args:
        model: What is trained.
        optimizer: Torch's own, unwrapped.
        parameters: What `trained` found.
        scaled: Whether a GradScaler is at work.

    Raises:
        InputError: Nothing trains; a wrapper the guard cannot see through; an eps that is 0 in its parameters'
            dtype; parameters under a GradScaler in a dtype it cannot unscale.
    """
    if not parameters:
        raise InputError(
            f"guard: no parameter of {type(model).__name__} requires a gradient and {type(optimizer).__name__} holds "
            "none; pass the model and the optimizer that are trained"
        )
    for module in model.modules():
        if type(module).__name__ in ("FullyShardedDataParallel", "DeepSpeedEngine"):
            raise InputError(
                f"guard: {type(module).__name__} keeps gradients in flat buffers of its own, whose norms and shards "
                "the guard cannot tell; use torch.distributed.fsdp.fully_shard, or DistributedDataParallel"
            )
    names = {id(p): n for n, p in parameters.items()}
    for number, eps, name, dtype in zero_eps(optimizer.param_groups, names):
        smallest = torch.finfo(dtype).smallest_normal
        raise InputError(
            f"guard: {type(optimizer).__name__} has eps={eps:g} in parameter group {number}, which is 0 in "
            f"{dtype} of {name}: one step with a small gradient makes such weights non-finite while its norm looks "
            f"healthy. Train them in float32, or set eps of at least {smallest:g}"
        )
    if scaled:
        for name, parameter in parameters.items():
            if parameter.requires_grad and not unscales(parameter.device, parameter.dtype):
                dtype = str(parameter.dtype).removeprefix("torch.")
                raise InputError(
                    f"guard: {name} is {dtype} and trains under a GradScaler, which cannot unscale {dtype} gradients "
                    f"on {parameter.device.type}; keep what trains in float32 (parameter.data = parameter.data.float(),"
                    " or PEFT's autocast_adapter_dtype=True) and let autocast compute in float16"
                )
    return tuple(_warnings(model, scaled=scaled))


def zero_eps(groups: Iterable[dict[str, Any]], names: dict[int, str]) -> Iterator[tuple[int, float, str, torch.dtype]]:
    """Parameter groups whose eps is 0 in the dtype of a parameter: number, eps, first such parameter, its dtype.

    Args:
        groups: As an optimizer has them.
        names: Of the parameters, by identity.
    """
    for number, group in enumerate(groups):
        eps: Any = group.get("eps")
        if not isinstance(eps, float) or eps == 0.0:
            continue  # a pair (Adafactor), none (SGD), or 0 by the caller's own wish
        for parameter in group["params"]:
            if parameter.is_floating_point() and float(torch.tensor(eps, dtype=parameter.dtype)) == 0.0:
                yield number, eps, names[id(parameter)], parameter.dtype
                break


@cache
def unscales(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a GradScaler takes gradients of a dtype on a device: tried, on one number.

    Never float16; bfloat16 on the CPU, and on CUDA devices by the version of torch.
    """
    if device.type == "meta" or dtype not in (torch.float16, torch.bfloat16):
        return True
    parameter = nn.Parameter(torch.zeros(1, device=device, dtype=dtype), requires_grad=True)
    parameter.grad = torch.zeros_like(parameter)
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale(torch.ones((), device=device))
    try:
        scaler.unscale_(torch.optim.SGD([parameter], lr=0.0))
    except (ValueError, RuntimeError):  # NotImplementedError is a RuntimeError
        return False
    return True


def quantised(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of quantised layers, and of those among them that compute in float16 by their own setting."""
    layers = [(plain(n), m) for n, m in model.named_modules() if _is_quantised(m)]
    half = [n for n, m in layers if getattr(m, "compute_dtype", None) == torch.float16]
    return [n for n, _ in layers], half


def _warnings(model: nn.Module, *, scaled: bool) -> Iterator[str]:
    layers, half = quantised(model)
    if half:
        yield (
            f"guard: {len(half)} quantised layers compute in float16 ({half[0]} first), which overflows where "
            "bfloat16 does not; load with bnb_4bit_compute_dtype=torch.bfloat16, or torch.float32 where the card "
            "has no bfloat16"
        )
    elif layers and scaled:
        yield (
            f"guard: {len(layers)} quantised layers ({layers[0]} first) run under float16 autocast "
            "(a GradScaler is at work), which overflows where bfloat16 does not; train with bf16=True, or without "
            "mixed precision and with bnb_4bit_compute_dtype=torch.float32"
        )


def _is_quantised(module: nn.Module) -> bool:
    weight: Any = getattr(module, "weight", None)
    if weight is None:
        weight = getattr(module, "qweight", None)
    return isinstance(weight, torch.Tensor) and (hasattr(weight, "quant_state") or not weight.is_floating_point())


def plain(name: str) -> str:
    """A name without what DDP, FSDP1 and torch.compile put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "") if name.startswith(wrapper) or f".{wrapper}" in name else name
    return name
