"""Losses that keep their scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hfpatch.errors import InputError
from hfpatch.given import TENSOR, optional, want

if TYPE_CHECKING:
    from torch import Tensor

FLOOR = 0.1
"""Smallest root mean square a row of the teacher is divided by, in parts of the median row's."""


def normalized_mse(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean over tokens of `|student - teacher|^2 / |teacher|^2`, for distilling hidden states.

    0 where both are equal and 1 where the student is 0, whatever the magnitude of the teacher: the loss neither
    explodes with a residual stream that grows from layer to layer, nor vanishes. Each token is divided by its own
    size, so that the few with massive activations do not drown the others; a token that is (nearly) 0 in the teacher
    is divided by a tenth of the median token's size, so that it does not explode. Where the whole teacher is 0 there
    is nothing to divide by, and it is the plain mean square of the student.

    Computed in float32 (float64 for float64), with autocast off inside. NaN and Inf in either, outside the mask, make
    the loss NaN: nothing is hidden.

    Args:
        student: `[..., width]`, floating.
        teacher: `[..., width]`, as the student's, in any floating dtype. No gradient goes into it.
        mask: `[...]`, true (or not 0) where a token counts, such as an attention mask. Others add nothing, and their
            gradient is exactly 0, whatever they hold.

    Returns:
        0-dim, float32 (or float64). 0, with a gradient of 0, if no token counts.

    Raises:
        InputError: The shapes do not go together, or a dtype is not floating.
    """
    want("normalized_mse", student=(student, TENSOR), teacher=(teacher, TENSOR), mask=(mask, optional(TENSOR)))
    if student.shape != teacher.shape or student.dim() == 0:
        raise InputError(
            f"normalized_mse: want student and teacher of one shape [..., width], got {tuple(student.shape)} and "
            f"{tuple(teacher.shape)}; project the student to the teacher's width first"
        )
    if not student.is_floating_point() or not teacher.is_floating_point():
        raise InputError(f"normalized_mse: want floating tensors, got {student.dtype} and {teacher.dtype}")
    if mask is not None and mask.shape != student.shape[:-1]:
        raise InputError(
            f"normalized_mse: want a mask of shape {tuple(student.shape[:-1])}, one value a token, got "
            f"{tuple(mask.shape)}"
        )
    with torch.autocast(student.device.type, enabled=False):
        wide = torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)
        s, t = student.to(wide), teacher.detach().to(wide)
        counts = torch.ones_like(t[..., 0], dtype=torch.bool) if mask is None else mask.to(t.device) != 0
        s, t = (torch.where(counts[..., None], x, torch.zeros_like(x)) for x in (s, t))
        size = _size(t, counts)[..., None]
        # divided before they are squared: the square of a bfloat16 value can pass float32
        rows = (s / size - t / size).square().mean(-1)
        return rows.sum() / counts.sum().clamp(min=1)


def _size(teacher: Tensor, counts: Tensor) -> Tensor:
    """What each row `[..., width]` is divided by: its root mean square, but not far below the median one's."""
    largest = teacher.abs().amax(-1)
    unit = torch.where(largest > 0, largest, torch.ones_like(largest))
    size = unit * (teacher / unit[..., None]).square().mean(-1).sqrt()
    nothing = torch.full_like(size, torch.nan)
    median = torch.where(counts & (size > 0), size, nothing).nanmedian()
    # no row that counts holds anything: nothing to divide by
    return torch.where(median.isnan(), torch.ones_like(size), torch.maximum(size, FLOOR * median))
