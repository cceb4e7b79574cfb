"""Losses whose scale does not depend on the magnitude of the hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hfpatch.errors import InputError
from hfpatch.given import TENSOR, optional, want

if TYPE_CHECKING:
    from torch import Tensor

FLOOR = 0.1
"""Smallest divisor of a row, as a fraction of the median row's root mean square."""


def normalized_mse(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean over tokens of `|student - teacher|^2 / |teacher|^2`, for distilling hidden states.

    It is 0 if both are equal and 1 if the student is 0, for any magnitude of the teacher: the loss neither explodes nor
    vanishes with a residual stream that grows from layer to layer. Each token is divided by its own size, so the few
    tokens with massive activations do not dominate; a token that is (nearly) 0 in the teacher is divided by a tenth of
    the median token's size. If the whole teacher is 0, the loss is the plain mean square of the student.

    It is computed in float32 (float64 for float64), with autocast off. NaN and Inf in student or teacher make the loss
    NaN, unless they are masked.

    Args:
        student: Hidden states, `[..., width]`, floating-point.
        teacher: Hidden states of the same shape, in any floating-point dtype. It gets no gradient.
        mask: `[...]`, true (or not 0) for tokens that count, such as an attention mask; None for all. Other tokens add
            nothing, and their gradient is exactly 0, even if they are not finite.

    Returns:
        The loss, 0-dim, float32 (or float64). 0, with a gradient of 0, if no token counts.

    Raises:
        InputError: The shapes do not match, or a dtype is not floating-point.
    """
    want("normalized_mse", student=(student, TENSOR), teacher=(teacher, TENSOR), mask=(mask, optional(TENSOR)))
    if student.shape != teacher.shape or student.dim() == 0:
        raise InputError(
            f"normalized_mse: want student and teacher of the same shape [..., width], got {tuple(student.shape)} and "
            f"{tuple(teacher.shape)}; project the student to the teacher's width first"
        )
    if not student.is_floating_point() or not teacher.is_floating_point():
        raise InputError(
            f"normalized_mse: want floating-point tensors, got {student.dtype} and {teacher.dtype}; pass hidden states"
        )
    if mask is not None and mask.shape != student.shape[:-1]:
        raise InputError(
            f"normalized_mse: want a mask of shape {tuple(student.shape[:-1])}, one value per token, got "
            f"{tuple(mask.shape)}"
        )
    if mask is not None and (mask.layout != torch.strided or (mask.is_meta and not student.is_meta)):
        where = "on the meta device" if mask.is_meta else f"of layout {mask.layout}"
        raise InputError(f"normalized_mse: the mask is {where}, so its values cannot be compared; pass a dense one")
    with torch.autocast(student.device.type, enabled=False):
        wide = torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)
        s, t = student.to(wide), teacher.detach().to(wide)
        counts = torch.ones_like(t[..., 0], dtype=torch.bool) if mask is None else mask.to(t.device) != 0
        s, t = (torch.where(counts[..., None], x, torch.zeros_like(x)) for x in (s, t))
        size = _size(t, counts)[..., None]
        # divided before squaring: the square of a bfloat16 value can overflow in float32
        rows = (s / size - t / size).square().mean(-1)
        return rows.sum() / counts.sum().clamp(min=1)


def _size(teacher: Tensor, counts: Tensor) -> Tensor:
    """Return the divisor of each row `[..., width]`: its root mean square, at least `FLOOR` times the median one's."""
    largest = teacher.abs().amax(-1)
    unit = torch.where(largest > 0, largest, torch.ones_like(largest))
    size = unit * (teacher / unit[..., None]).square().mean(-1).sqrt()
    nothing = torch.full_like(size, torch.nan)
    median = torch.where(counts & (size > 0), size, nothing).nanmedian()
    # every row that counts is 0: divide by 1
    return torch.where(median.isnan(), torch.ones_like(size), torch.maximum(size, FLOOR * median))
