"""Torch's optimizers: those inside accelerate's, their parameters, and which of them can skip a step themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def inside(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the torch optimizer inside one that accelerate prepared; None if there is none."""
    inner: Any = optimizer
    while type(inner).__module__.startswith("accelerate."):
        inner = getattr(inner, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else None


def parameters_by_id(optimizer: torch.optim.Optimizer) -> dict[int, nn.Parameter]:
    """Return an optimizer's parameters, by id."""
    return {id(p): p for group in optimizer.param_groups for p in group["params"]}


def skips_itself(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer reads `grad_scale` and `found_inf` and leaves out its step by them: torch's fused ones.

    It says so by `_step_supports_amp_scaling`, which `GradScaler.step` asks for. Known in torch 2.11 to 2.13; False
    without it.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
