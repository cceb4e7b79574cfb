"""Names the operation that made the first bad value, its cause and its symptom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from hfpatch.compat import operators
from hfpatch.dtypes import dtype_name
from hfpatch.model.norms import acts_as_norm
from hfpatch.model.roles import is_block
from hfpatch.tracing.naming.arithmetic import (
    ADDITIONS,
    MATMULS,
    POWERS,
    division,
    indefinite,
    pole,
    power,
)
from hfpatch.tracing.naming.operations import DIVISIONS, NORMS, SOFTMAX
from hfpatch.tracing.naming.origin import Operand, Origin

CASTS = {operators.COPY, "to", "copy"}
ROOTS_AND_LOGS = {"log", "log2", "log10", "log1p", "sqrt", "asin", "acos", "lgamma"}
EXPONENTIALS = {"exp", "exp2", "expm1", "sinh", "cosh"}
SPREADS = {"std", "var", "std_mean", "var_mean"}


@dataclass(frozen=True)
class Cause:
    """Descriptions of an operation and its operands, the key of the symptom, and the cause in a sentence."""

    operation: str
    operand: str
    symptom: str
    why: str


def cause(origin: Origin, modules: Mapping[str, nn.Module]) -> Cause:
    """Return the cause of an origin.

    Args:
        origin: The operation that the replay found.
        modules: The traced model's modules, by path.
    """
    module = modules.get(origin.module)
    operation = name(origin, module)
    operand = _operands(origin)
    symptom, why = _why(origin, module)
    return Cause(operation, operand, symptom, why)


def cause_in_backward(origin: Origin, met: Origin, modules: Mapping[str, nn.Module]) -> Cause:
    """Return the cause of an origin whose values were found in a backward pass.

    Args:
        origin: The operation that made the values, in the forward or backward pass.
        met: The operation of the backward pass that first had them in its result; the origin itself if it made them.
        modules: The traced model's modules, by path.
    """
    found = cause(origin, modules)
    words = name(origin, None).partition(" (")[0]
    if not origin.node:
        meets = indefinite(met) or name(met, None)
        after = (
            f"backward computes with it: {meets} ({met.node})" if indefinite(met) else f"backward meets it in {meets}"
        )
        if not origin.hidden:
            return replace(found, why=f"{found.why}; the forward pass ends finite all the same, and {after}")
        advice = f"change what {words} is given, not its result"
        why = f"{found.why}; {origin.hidden} drops it in the forward pass, and {after}; {advice}"
        return replace(found, symptom="hidden-in-forward", why=why)
    if met.hidden and met.holds == "nan" and any(o.at == 0 for o in met.operands):
        form = "" if found.symptom == "indefinite" else ", and 0 x inf is NaN"
        dropped = f"{met.hidden} drops its value in the forward pass, so the gradient that comes in is 0{form}"
        why = f"{found.why}; {dropped}; change what is given to it, not its result"
        return replace(found, symptom="hidden-in-forward", why=why)
    return found


def name(origin: Origin, module: nn.Module | None) -> str:
    """Return the usual name of an operation, such as `residual add` or `matmul of queries and keys`."""
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
    elif op in operators.CTC:
        words = "ctc_loss"
    elif op in operators.RMS_NORMS:
        words = "RMS norm"
    elif op in CASTS:
        words = f"cast to {dtype_name(origin.result)}"
    else:
        words = {
            "mul": "multiplication",
            "pow": "power",
            "div": "division",
            "reciprocal": "division",
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
        return "bad-weight", f"{weight!r} is not finite, though it was when the step began"
    if origin.given:
        return "bad-input", f"an operand was not finite before: {_operands(origin)}"
    if op in SOFTMAX and origin.masked:
        return "masked-row", "a row in which every key is masked: the softmax of a row of -Inf is NaN"
    if op == "nll_loss_forward" and origin.holds == "nan":
        return "no-labels", "every label is ignored: a mean over no token is NaN, and its gradients are 0"
    if op in operators.CTC and origin.lengths is not None:
        frames, labels = origin.lengths
        what = f"a sample has {frames} frames for {labels} labels (repeated ones need a frame between them)"
        return "too-few-frames", f"{what}, so no alignment exists; leave it out, or set zero_infinity"
    if op in NORMS and origin.holds == "nan" and origin.numbers and origin.numbers[-1] == 0:
        return "zero-norm", "its eps is 0 and a row is constant, so the row is divided by 0"
    if any(0 in o.shape for o in origin.operands):
        return "empty-mean", f"{op} over no element"
    if op in SPREADS and origin.holds == "nan":
        return "empty-mean", f"{op} over one element: the divisor n - 1 is 0"
    if (found := pole(origin)) is not None:
        return found
    if op in DIVISIONS and (found := division(origin, norm=module is not None and acts_as_norm(module))) is not None:
        return found
    if (text := indefinite(origin)) is not None:
        return "indefinite", text
    if op in ROOTS_AND_LOGS and origin.operands:
        least = min(o.least for o in origin.operands)
        return "out-of-domain", f"{op} of {_at(origin, 0, least)}"
    if origin.name.startswith(operators.ATTENTION):
        if origin.node and origin.holds != "nan":
            return "overflow", f"a gradient of the fused kernel exceeds {limit}"
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
    if op in EXPONENTIALS and origin.operands:
        return "overflow", f"{op} of {_at(origin, 0)} exceeds {limit}"
    if op in POWERS and (found := power(origin)) is not None:
        return found
    if op in POWERS and origin.operands:
        return "square-overflow", f"a power of {_at(origin, 0)} exceeds {limit}"
    if op == "mul" and origin.operands:
        shown = [*(_at(origin, i) for i in range(len(origin.operands))), *(f"{n:.3g}" for n in origin.numbers)]
        factors = " x ".join(shown[:2])
        if len(origin.operands) == 2 and origin.operands[0] == origin.operands[1]:
            return "square-overflow", f"{factors} exceeds {limit}"
        return "overflow", f"{factors} exceeds {limit}"
    given = ", ".join(_size(o) for o in origin.operands) or "nothing"
    if origin.holds == "nan" and any(o.nonfinite for o in origin.operands):
        return "indefinite", f"{op} of {given}, which holds Inf: 0 x inf and inf - inf are NaN"
    if origin.holds == "nan":
        return "unknown", f"{op} makes NaN from {given}"
    return "overflow", f"{op} of {given} exceeds {limit}"


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
