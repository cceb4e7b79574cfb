"""The tensor in a module's output, copies of it, and the leaves of autograd's graph that it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def tensor_of(output: Any) -> torch.Tensor | None:
    """Return a module's output tensor, or the first item of an output tuple, if it holds floats; None without."""
    found = output[0] if type(output) is tuple and output else output
    return found if isinstance(found, torch.Tensor) and found.is_floating_point() else None


def with_tensor(output: Any, tensor: torch.Tensor) -> Any:
    """Return a module's output with another tensor in place of that of `tensor_of`."""
    return (tensor, *output[1:]) if type(output) is tuple else tensor


def requires_gradient(output: Any) -> bool:
    """True if the tensor in a module's output requires a gradient."""
    tensor = tensor_of(output)
    return tensor is not None and tensor.requires_grad


def copied(output: Any) -> Any:
    """Return a module's output with a copy of its tensor that requires a gradient.

    The copy is no leaf, so it may be written to in place, and `requires_grad_()` on it changes nothing.

    Returns:
        The output; None where gradients are off, and for an output without a tensor of floats.
    """
    tensor = tensor_of(output)
    if tensor is None or tensor.is_inference() or not torch.is_grad_enabled():
        return None
    return with_tensor(output, (tensor if tensor.requires_grad else tensor.detach().requires_grad_()).clone())


def leaves(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the leaves of autograd's graph that a tensor comes from."""
    if tensor.grad_fn is None:
        yield from (tensor,) if tensor.requires_grad else ()
        return
    pending: list[Any] = [tensor.grad_fn]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        pending.extend(inner for inner, _ in node.next_functions)
