# modes are pushed and popped by hooks, which begin in one call and end in another: a `with` cannot do that
# pyright: reportPrivateUsage=false
"""The stack of `TorchFunctionMode`s of a thread, and the way around tensor subclasses. Known in torch 2.11 to 2.13."""

from __future__ import annotations

from typing import Any

import torch
from torch import overrides

push = overrides._push_mode
"""Put a mode on this thread's stack; `mode.__enter__` does this too, and notes more."""

pop = overrides._pop_mode
"""Take the topmost mode off this thread's stack, and return it."""

AsPlain = torch._C.DisableTorchFunctionSubclass
"""A context in which a tensor subclass is treated as a plain tensor, while modes go on."""


def topmost() -> Any:
    """Return the mode on top of this thread's stack; None if there is none."""
    return overrides._get_current_function_mode() if torch._C._len_torch_function_stack() else None


def unpacked_codes(tools: Any, data: torch.Tensor, state: Any) -> Any:
    """Return 4-bit codes and their state as `bitsandbytes.functional` had them before it packed them for a CPU."""
    return tools._convert_weight_packed_for_cpu_inverse(data, state)
