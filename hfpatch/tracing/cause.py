"""From the operation that made the first bad value to its name, the cause in words, and the symptom's key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from hfpatch.compat import operators
from hfpatch.dtypes import dtype_name
from hfpatch.model.norms import acts_as_norm
from hfpatch.model.roles import is_block
from hfpatch.tracing.operations import SOFTMAX, Operand, Origin

ADDITIONS = {"add", "sub", "rsub"}
MATMULS = operators.MATMULS | {"mm", "bmm", "addmm", "baddbmm", "mv", "dot", "matmul", "linear"}
POWERS = {"pow", "square"}
DIVISIONS = {"div", "true_divide", "rsqrt", "reciprocal"}
CASTS = {operators.COPY, "to", "copy"}
ROOTS_AND_LOGS = {"log", "log2", "log10", "log1p", "sqrt", "asin", "acos", "lgamma"}
NORMS = operators.RMS_NORMS | {
    "native_layer_norm",
    "native_layer_norm_backward",
    "native_group_norm",
    "native_group_norm_backward",
    "native_batch_norm",
    "native_batch_norm_backward",
}


@dataclass(frozen=True)
class Cause:
    """An operation in words, what it was given, the symptom, and a sentence."""

    operation: str
    operand: str
    symptom: str
    why: str


def cause(origin: Origin, modules: Mapping[str, nn.Module]) -> Cause:
    """Name the cause of an origin.

    Args:
        origin: What the replay saw.
        modules: Of the traced model, by path.
    """
    module = modules.get(origin.module)
    operation = name(origin, module)
    operand = _operands(origin)
    symptom, why = _why(origin, module)
    return Cause(operation, operand, symptom, why)


def name(origin: Origin, module: nn.Module | None) -> str:
    """The operation in the field's words."""
    op = origin.name
    if op.startswith(operators.ATTENTION):
        words = "scaled_dot_product_attention"
    elif op in ADDITIONS:
        words = "residual add" if _in_stream(module) and not origin.node else "add" if op == "add" else "subtraction"
    elif op in MATMULS:
        words = "matmul"
        if _is_attention(module) and not origin.node:
            words = "matmul of attention weights and values" if origin.after_softmax else "matmul of queries and keys"
    elif op in SOFTMAX:
        words = "softmax"
    elif op in operators.RMS_NORMS:
        words = "RMS norm"
    elif op in CASTS:
        words = f"cast to {dtype_name(origin.result)}"
    else:
        words = {
            "mul": "multiplication",
            "pow": "power",
            "div": "division",
            "rsqrt": "reciprocal square root",
            "native_layer_norm": "layer norm",
            "native_layer_norm_backward": "layer norm",
            "nll_loss_forward": "cross entropy",
            "convolution": "convolution",
        }.get(op, op)
    if origin.node:
        words = f"{words} ({origin.node})"
    return words


def _why(origin: Origin, module: nn.Module | None) -> tuple[str, str]:
    limit = _limit(origin.result)
    op = origin.name
    if op in NORMS and op.endswith("_backward"):
        return "near-constant-row", f"the gradient of a norm whose row hardly varies: the gain 1/std passes {limit}"
    if origin.given and (weight := next((o.name for o in origin.operands if o.nonfinite and o.name), None)):
        return "bad-weight", f"{weight!r} holds it, though it did not when the step began"
    if origin.given:
        return "bad-input", f"an operand holds it already: {_operands(origin)}"
    if op in SOFTMAX and origin.masked:
        return "masked-row", "a row in which every key is masked: the softmax of nothing but -Inf is NaN"
    if op == "nll_loss_forward" and origin.holds == "nan":
        return "no-labels", "every label is the ignored one: a mean over no token is NaN, and its gradients are 0"
    if op in DIVISIONS and (division := _division(origin, module)) is not None:
        return division
    if op in ROOTS_AND_LOGS and origin.operands:
        least = min(o.least for o in origin.operands)
        return "out-of-domain", f"{op} of {_at(origin, 0, least)}"
    if origin.name.startswith(operators.ATTENTION):
        if origin.node or origin.name.endswith("_backward"):
            return "attention-backward-nan", "the fused kernel gives NaN gradients from finite operands"
        return "masked-row", "the fused kernel gives NaN: a row in which every key is masked, or a product too large"
    if op in CASTS:
        named = f" of {origin.operands[0].name!r}" if origin.operands and origin.operands[0].name else ""
        return "cast-overflow", f"{_at(origin, 0, _largest(origin))}{named} exceeds {limit}"
    if op in ADDITIONS and len(origin.operands) > 1:
        sign = "-" if op == "sub" else "+"
        text = f"{_at(origin, 0)} {sign} {_at(origin, 1)} exceeds {limit}"
        if _in_stream(module):
            return "residual-overflow", text
        return "overflow", text
    if op in MATMULS:
        exact = (
            f" gives {origin.exact:.3g}, which" if origin.exact is not None and abs(origin.exact) > _max(origin) else ""
        )
        shown = [o for o in origin.operands if len(o.shape) > 1][-2:]
        text = f"{' x '.join(_size(o) for o in shown)}{exact} exceeds {limit}"
        if _is_attention(module) and not origin.after_softmax and not origin.node:
            return "attention-logits-overflow", text
        return "overflow", text
    if op in POWERS and origin.operands:
        return "square-overflow", f"a power of {_at(origin, 0)} exceeds {limit}"
    if op == "mul" and origin.operands:
        shown = [*(_at(origin, i) for i in range(len(origin.operands))), *(f"{n:.3g}" for n in origin.numbers)]
        factors = " x ".join(shown[:2])
        if len(origin.operands) == 2 and origin.operands[0] == origin.operands[1]:
            return "square-overflow", f"{factors} exceeds {limit}"
        return "overflow", f"{factors} exceeds {limit}"
    given = ", ".join(_size(o) for o in origin.operands) or "nothing"
    if origin.holds == "nan":
        return "unknown", f"{op} makes NaN from {given}"
    return "overflow", f"{op} of {given} exceeds {limit}"


def _division(origin: Origin, module: nn.Module | None) -> tuple[str, str] | None:
    """A division whose divisor is 0, or a root of 0."""
    divisor = origin.operands[-1] if origin.operands else None
    if divisor is None:
        return None
    at = divisor.at if divisor.at is not None else divisor.least
    if at != 0 and divisor.least != 0:
        return None
    if origin.vanished is not None:
        eps = f"the eps {origin.vanished:g} is 0 in {dtype_name(origin.result)}"
        return "eps-underflow", f"{eps}: nothing keeps the divisor from 0"
    if module is not None and acts_as_norm(module):
        return "zero-norm", "a row of zeros, and no eps that keeps the divisor from 0"
    words = "0 / 0" if origin.holds == "nan" else "a division by 0"
    return "division-by-zero", words


def _in_stream(module: nn.Module | None) -> bool:
    return module is not None and is_block(module)


def _is_attention(module: nn.Module | None) -> bool:
    return module is not None and "attention" in type(module).__name__.lower()


def _operands(origin: Origin) -> str:
    return ", ".join(_size(o) for o in origin.operands)


def _size(operand: Operand) -> str:
    shape = "x".join(map(str, operand.shape)) or "scalar"
    name = f"{operand.name!r}, " if operand.name else ""
    return f"{name}{dtype_name(operand.dtype)} [{shape}] up to {operand.largest:.3g}"


def _at(origin: Origin, index: int, instead: float | None = None) -> str:
    if index >= len(origin.operands):
        return "?"
    operand = origin.operands[index]
    value = operand.at if operand.at is not None else instead if instead is not None else operand.largest
    return f"{value:.3g}"


def _largest(origin: Origin) -> float:
    return max((o.largest for o in origin.operands), default=0.0)


def _max(origin: Origin) -> float:
    return float(torch.finfo(origin.result).max)


def _limit(dtype: torch.dtype) -> str:
    top = float(torch.finfo(dtype).max)
    return f"{dtype_name(dtype)}'s {top:,.0f}" if top < 1e6 else f"{dtype_name(dtype)}'s {top:.3g}"
