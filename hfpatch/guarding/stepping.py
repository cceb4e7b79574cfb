"""The optimizer of a guarded run: the parameters it holds, and whether it can skip a step."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from hfpatch.compat.optimizers import parameters_by_id, skips_itself
from hfpatch.errors import InputError
from hfpatch.guarding.checks import check, outside, trained_parameters
from hfpatch.guarding.judge import Judge
from hfpatch.guarding.ledger import Limits


def update_parameters(judge: Judge, model: nn.Module, optimizer: torch.optim.Optimizer, *, scaled: bool) -> None:
    """Pass the optimizer's parameters to the judge if the optimizer has gained or lost some.

    Raises:
        InputError: See `hfpatch.guarding.checks.check`.
    """
    if parameters_by_id(optimizer).keys() != judge.ids:
        parameters = trained_parameters(model, optimizer)
        check(model, optimizer, parameters, scaled=scaled)
        judge.set_parameters(parameters)
        judge.outside = outside(model, optimizer)


def keeps_on_device(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], wanted: bool | None) -> bool:
    """True if the decision stays on the device.

    Raises:
        InputError: That was asked for, and the optimizer cannot skip a step by itself.
    """
    fused = skips_itself(optimizer)
    if fused and isinstance(optimizer, torch.optim.SGD) and any(g["momentum"] != 0 for g in optimizer.param_groups):
        if wanted:
            raise InputError(
                "guard: on_device=True, but SGD with momentum cannot skip by itself: if its first step is skipped, "
                "torch leaves the momentum uninitialised; use momentum=0 or fused AdamW, or leave on_device out: the "
                "host then reads the decision once per step"
            )
        return False
    if wanted and not fused:
        raise InputError(
            f"guard: on_device=True, but this {type(optimizer).__name__} cannot skip by itself; pass fused=True to the "
            "optimizer, or leave on_device out: the host then reads the decision once per step"
        )
    if wanted is None:
        return fused and all(p.device.type == "cuda" for p in parameters.values())
    return wanted


def check_arguments(
    scheduler: Any,
    accelerator: Any,
    accumulation_steps: int,
    max_grad_norm: float | None,
    limits: Limits,
) -> None:
    """Raise an InputError for arguments of a guard that contradict each other or are out of range."""
    inner = getattr(scheduler, "scheduler", scheduler)
    if inner is not None and "metrics" in inspect.signature(inner.step).parameters:
        raise InputError(f"guard: {type(inner).__name__} needs a metric; leave scheduler= out and step it yourself")
    if accelerator is not None and accumulation_steps not in (1, accelerator.gradient_accumulation_steps):
        raise InputError(
            f"guard: accumulation_steps={accumulation_steps}, but the accelerator accumulates "
            f"{accelerator.gradient_accumulation_steps}; leave accumulation_steps= out, the accelerator's is used"
        )
    numbers = {
        "accumulation_steps": accumulation_steps,
        "max_skips": limits.max_skips,
        "max_grad_norm": max_grad_norm,
        "explode_at": limits.explode_at,
        "spike_at": limits.spike_at,
    }
    for name in ("min_scale", "check_parameters"):
        if (least := getattr(limits, name)) < 0:
            raise InputError(f"guard: {name}={least}; want 0 or more")
    for name, value in numbers.items():
        if value is not None and not value > 0:
            raise InputError(f"guard: {name}={value}; want a number above 0, or None for no limit where there is one")
