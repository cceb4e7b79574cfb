"""An operation that made a bad value, and its operands, as data."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Operand:
    """A tensor argument of an operation, as it was before the operation ran.

    Attributes:
        name: Name of the parameter or buffer; empty for a computed tensor.
        shape, dtype: Of the tensor.
        largest: Largest finite magnitude; 0 if no element is finite.
        least: Smallest finite magnitude; 0 if no element is finite.
        at: Its value where the result has its first bad element; None if it does not broadcast to the result.
        nonfinite: True if it held a NaN or an infinity.
        made: Names of the last operations that it was computed by, the last first, without `PASSING`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    largest: float
    least: float
    at: float | None
    nonfinite: bool
    made: tuple[str, ...] = ()

    @property
    def counts(self) -> bool:
        """True if it is of whole numbers, or its largest value is one, as in sums of a mask."""
        return not self.dtype.is_floating_point or (self.largest >= 1 and self.largest == round(self.largest))


@dataclass(frozen=True)
class Origin:
    """The operation that made the first bad value of a call.

    Attributes:
        name: Name of the operation in torch (`add`, `mm`, `_softmax`).
        node: Name of the backward function it ran in (`MulBackward0`); empty in a forward pass.
        module: Path of the module whose code ran it.
        operands: Its floating-point tensor arguments, in order.
        result: dtype of the result.
        holds: The first bad element: `nan`, `+inf` or `-inf`.
        exact: For a matrix product, that element computed in float64 from the operands; None for other operations.
        terms: For a matrix product that is NaN: `0 x inf` or `inf - inf`; "" for others.
        lengths: For a CTC loss, frames and labels of the first sample that has too few frames; None if none has.
        hidden: The operation that drops its value in the forward pass, in words: `where()`; "" if none is known.
        after_softmax: True if a softmax ran before it in the same module.
        masked: True if it is a softmax over a row of only -Inf.
        vanished: The last small number (an eps) in the same module that was 0 in its dtype; None if there was none.
        numbers: Numbers among its arguments.
        given: True if an operand held a NaN or an infinity when the call began.
    """

    name: str
    node: str
    module: str
    operands: tuple[Operand, ...]
    result: torch.dtype
    holds: str
    exact: float | None
    after_softmax: bool
    masked: bool
    vanished: float | None = None
    numbers: tuple[float, ...] = ()
    given: bool = False
    terms: str = ""
    lengths: tuple[int, int] | None = None
    hidden: str = ""
