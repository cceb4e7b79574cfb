"""Reads the operands of an operation: their sizes, and the elements that one element of the result is made of."""

from __future__ import annotations

from typing import Any

import torch

from hfpatch.tracing.naming.origin import Operand
from hfpatch.tracing.tensors import local


def operand(name: str, tensor: torch.Tensor, nonfinite: bool, place: list[int], made: tuple[str, ...]) -> Operand:
    """Return an operand as data; the arguments are as for `Operand`, `place` is that of the first bad element."""
    held = local(tensor.detach())
    if held.is_complex():
        held = held.abs()
    wide = held.double()
    finite = wide[wide.isfinite()].abs()
    return Operand(
        name=name,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        largest=float(finite.max()) if finite.numel() else 0.0,
        least=float(finite.min()) if finite.numel() else 0.0,
        at=_at(wide, place),
        nonfinite=nonfinite,
        made=made,
    )


def _at(tensor: torch.Tensor, place: list[int]) -> float | None:
    """Return the element of an operand that is broadcast to a place of the result; None if its shape does not fit."""
    if tensor.dim() > len(place):
        return None
    index = place[len(place) - tensor.dim() :]
    sizes = tensor.shape
    if any(size not in (1,) and i >= size for size, i in zip(sizes, index, strict=True)):
        return None
    return float(tensor[tuple(0 if size == 1 else i for size, i in zip(sizes, index, strict=True))])


def line_of(name: str, operands: list[torch.Tensor], place: list[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the row and column of a matrix product that make one element, in float64; None for other operations."""
    pair = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "mv": (0, 1), "dot": (0, 1)}.get(name)
    if pair is None or len(operands) <= pair[1]:
        return None
    left, right = (local(operands[i].detach()) for i in pair)
    if left.is_complex() or len(place) < left.dim():
        return None
    row = left[tuple(place[:-1])] if left.dim() > 1 else left
    column = right[(*place[:-2], slice(None), place[-1])] if right.dim() > 1 else right
    return (row.double(), column.double()) if row.shape == column.shape else None


def exact(line: tuple[torch.Tensor, torch.Tensor] | None) -> float | None:
    """Return the element that a row and a column make."""
    return None if line is None else float(line[0] @ line[1])


def terms(line: tuple[torch.Tensor, torch.Tensor] | None) -> str:
    """Return why the element that a row and a column make is NaN: `0 x inf` or `inf - inf`; "" if it need not be."""
    if line is None:
        return ""
    products = line[0] * line[1]
    if bool(products.isnan().any()):
        return "0 x inf"
    return "inf - inf" if bool(products.isinf().any()) else ""


def ctc_lengths(args: Any) -> tuple[int, int] | None:
    """Return frames and labels of the first sample of a CTC loss that has too few frames; None if none has.

    Two equal labels in a row need a frame between them, which is counted with the labels.
    """
    log_probs, labels, frames, counts = args[:4]
    frames, counts = ([int(n) for n in torch.as_tensor(part, device="cpu").flatten()] for part in (frames, counts))
    start = 0
    for row, (given, count) in enumerate(zip(frames, counts, strict=True)):
        own = labels[row, :count] if labels.dim() == 2 else labels[start : start + count]
        start += count
        wanted = count + int((own[1:] == own[:-1]).sum())
        if min(given, log_probs.shape[0]) < wanted:
            return given, wanted
    return None
