# torch has no public name for a tensor's version, nor for the end of a backward pass
# pyright: reportPrivateUsage=false
"""What autograd and `torch.func` know of a tensor and of the pass that runs. Known in torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_engine: Any = torch.autograd.Variable._execution_engine
_peek: Any = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]


def version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to in place; 0 for tensors of inference mode, which do not count it.

    `_version` is what autograd itself compares to tell that a saved tensor was overwritten.
    """
    return 0 if tensor.is_inference() else tensor._version


def after_backward(function: Callable[[], None]) -> None:
    """Have autograd call a function when the backward pass that runs now is over; DDP and FSDP do it so.

    Raises:
        RuntimeError: No backward pass runs.
    """
    _engine.queue_callback(function)


def in_transform() -> bool:
    """True inside a transformation of `torch.func`, where a tensor stands for many and holds no values.

    Reads functorch's stack of interpreters.
    """
    return _peek() is not None
