# torch has no public name for a tensor's version and hooks, for the end of a backward pass, nor for the node that runs
# pyright: reportPrivateUsage=false
"""What autograd and `torch.func` know of a tensor and of the pass that runs. Known in torch 2.11 to 2.13."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

_engine: Any = torch.autograd.Variable._execution_engine
_peek: Any = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]

_REENTRANT: Any = CheckpointFunction._backward_cls  # pyright: ignore[reportAttributeAccessIssue]

running_node: Callable[[], Any] = torch._C._current_autograd_node
"""Return the backward function that runs in this thread; None outside of a backward pass."""

next_number: Callable[[], int] = torch.autograd._get_sequence_nr
"""Return the number that autograd gives to the next backward function made in this thread."""


def number_of(node: Any) -> int:
    """Return the number of a backward function: in one thread they count up in the order in which forward made them."""
    return node._sequence_nr()


def name_of(node: Any) -> str:
    """Return the name of a backward function, such as `MulBackward0`; of a custom one `MyFunction.backward`."""
    name: str = node.name()
    return f"{name.removesuffix('Backward')}.backward" if isinstance(node, BackwardCFunction) else name


def is_reentrant_checkpoint(node: Any) -> bool:
    """True if a backward function runs part of the forward again, and `backward()` inside of it."""
    return isinstance(node, _REENTRANT)


def version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to in place; 0 for tensors of inference mode, which do not count it.

    `_version` is what autograd itself compares to tell that a saved tensor was overwritten.
    """
    return 0 if tensor.is_inference() else tensor._version


def on_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Have autograd call a hook with the gradient of a tensor that an operation made, as long as its graph lives.

    It is entered as `Tensor.register_hook` does it, under a key that torch never assigns, and without a handle: making
    one costs more than all else.
    """
    if tensor._backward_hooks is None:
        tensor._backward_hooks = OrderedDict()
        node: Any = tensor.grad_fn
        node._register_hook_dict(tensor)
    table: Any = tensor._backward_hooks
    table[-1 - len(table)] = hook


def steps_in_backward(parameter: torch.Tensor) -> bool:
    """True if something runs when a gradient was added to a parameter's `.grad`, such as an optimizer that frees it."""
    return bool(parameter._post_accumulate_grad_hooks)


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
