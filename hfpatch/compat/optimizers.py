"""Which of torch's optimizers take a gradient scale and an overflow flag into their own step."""

from __future__ import annotations

import torch


def skips_itself(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer reads `grad_scale` and `found_inf` and leaves out its step by them: torch's fused ones.

    It says so by `_step_supports_amp_scaling`, which `GradScaler.step` asks for. Known in torch 2.11 to 2.13; False
    without it.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
