"""A linear layer computed in float32 from half-precision weights, without a float32 copy of the whole weight."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from hfpatch.compat.quantising.packages import by_package
from hfpatch.errors import RefusedError

CHUNK = 2**22
"""Elements of the weight that are float32 at one time: 16 MiB."""


def linear_in_float32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ weight.T + bias` in float32, outside autocast. Gradients have the dtypes of their tensors.

    A weight in half precision is converted some rows at a time, forward and backward: a head of 262,144 x 2,560 would
    otherwise take 2.5 GiB more. No second derivatives.

    Args:
        x: `[..., in]`.
        weight: `[out, in]`.
        bias: `[out]`.

    Returns:
        `[..., out]` in float32.

    Raises:
        RefusedError: The weight is of a quantiser's class, which has no float32 form.
    """
    if (
        type(weight.data) in (torch.Tensor, torch.nn.Parameter)
        and weight.dtype != torch.float32
        and weight.numel() > CHUNK
    ):
        out: torch.Tensor = _InParts.apply(x, weight)  # pyright: ignore[reportUnknownMemberType, reportAssignmentType]
        return out if bias is None else out + bias.float()
    check_unpacked(weight)
    with outside_autocast(x.device.type):
        return functional.linear(x.float(), weight.float(), None if bias is None else bias.float())


def check_unpacked(weight: torch.Tensor) -> None:
    """Raise an error if a weight is of a quantiser's tensor class, which has no float32 form; not while it is traced.

    Raises:
        RefusedError: It is.
    """
    if torch.compiler.is_compiling() or type(weight) in (torch.Tensor, torch.nn.Parameter):
        return
    if package := by_package(weight):
        raise RefusedError(
            f"a patch computes a linear layer in float32, and its weight is {package}'s {type(weight).__name__}: it "
            "was quantised after the patch; hfpatch.revert(model), then quantise, then apply"
        )


class _InParts(torch.autograd.Function):
    """`x @ weight.T`, with the weight converted to float32 some rows at a time."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the product in float32."""
        flat = x.detach().reshape(-1, x.shape[-1]).float()
        out = flat.new_empty(len(flat), len(weight))
        with outside_autocast(x.device.type):
            for rows in _parts(weight):
                out[:, rows] = flat @ weight[rows].float().t()
        return out.reshape(*x.shape[:-1], len(weight))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        """Keep the operands, in their own dtypes."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients, each added up in float32 and then rounded to the dtype of its tensor."""
        x, weight = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad
        flat, grads = x.reshape(-1, x.shape[-1]).float(), grad.reshape(-1, grad.shape[-1]).float()
        of_x = torch.zeros_like(flat) if wants_x else None
        of_weight = torch.empty_like(weight) if wants_weight else None
        with outside_autocast(x.device.type):
            for rows in _parts(weight):
                if of_x is not None:
                    of_x.addmm_(grads[:, rows], weight[rows].float())
                if of_weight is not None:
                    of_weight[rows] = (grads[:, rows].t() @ flat).to(weight.dtype)
        return None if of_x is None else of_x.reshape(x.shape).to(x.dtype), of_weight


def _parts(weight: torch.Tensor) -> Iterator[slice]:
    step = max(1, CHUNK // weight.shape[1])
    for start in range(0, len(weight), step):
        yield slice(start, start + step)


def outside_autocast(device: str) -> Any:
    """Return a context without autocast; empty for meta, which has none (asking breaks a graph in torch 2.11)."""
    return contextlib.nullcontext() if device == "meta" else torch.autocast(device, enabled=False)
