"""The operation that grows or shrinks the signal, in words."""

from __future__ import annotations

import math

from hfpatch.tracing.growing.followed import FUSED_NORMS, Followed, Ran, Size
from hfpatch.tracing.growing.path import Step

DIVISIONS = {"div", "divide", "true_divide", "truediv", "rdiv", "rtruediv", "floordiv"}
PRODUCTS = {"mul", "multiply", "rmul", "imul"}
MATMULS = {
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d", "rmatmul", "mv",
    "grouped_mm",
}  # fmt: skip
POLES = {"log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "pow", "rpow", "norm", "vector_norm", "acos"}
ATTENTION = {"scaled_dot_product_attention", "multi_head_attention_forward"}
NAMES = {
    "layer_norm": "layer norm",
    "rms_norm": "RMS norm",
    "group_norm": "group norm",
    "batch_norm": "batch norm",
    "linear": "linear layer",
    "matmul": "matmul",
    "grouped_mm": "grouped matmul",
    "conv1d": "convolution",
    "conv2d": "convolution",
    "scaled_dot_product_attention": "attention",
    "add": "add",
}
TRANSPARENT = {"add", "sub", "masked_fill", "where", "view", "reshape", "float", "to", "type", "transpose"}
"""Operations between a scale and its softmax."""
FAR = 6


def operation(seen: Followed, step: Step) -> str:
    """Return the operation of a step, such as `division by rms 2.1e-09 + 1e-08`.

    Args:
        seen: The call that was run again.
        step: One of its steps.
    """
    ran = seen.ran[step.ran]
    if ran.path in seen.norms or ran.name in FUSED_NORMS:
        spread, eps = seen.norms.get(ran.path, (ran.spread or 0.0, ran.eps))
        name = NAMES.get(ran.name, "norm")
        return f"{name} of rows that hardly vary: they spread by {spread:.2g}, its eps is {eps:g}"
    if ran.name in DIVISIONS:
        return f"division by {_divisor(seen, ran)}"
    if ran.name in PRODUCTS:
        return f"multiplication by {_factor(ran)}{_before_softmax(seen, step.ran)}"
    if ran.name in MATMULS:
        weight = next((o for o in ran.operands if o.name), ran.operands[-1])
        name = f"{weight.name!r} of RMS {weight.rms:.2g}" if weight.name else f"values of RMS {weight.rms:.2g}"
        return f"{NAMES.get(ran.name, ran.name)} with {name}"
    if ran.name in POLES and ran.operands:
        power = f" to the power {ran.numbers[0]:g}" if ran.name == "pow" and ran.numbers else ""
        near = ran.operands[0]
        return f"{'power' if power else ran.name} of {near.least:.2g}{power}"
    if ran.name == "normalize":
        return f"normalisation of rows of RMS {ran.operands[0].rms:.2g}"
    if ran.name in ("softmax", "log_softmax"):
        return f"{ran.name} of values up to {ran.operands[0].largest:.3g}"
    if ran.name in ("exp", "expm1", "exp2", "tanh", "sigmoid"):
        return f"{ran.name} of values up to {ran.operands[0].largest:.3g}"
    if step.node and not _known(ran, step.node):
        return f"{step.node.removesuffix('Backward')}, a custom autograd Function"
    return NAMES.get(ran.name, ran.name)


def _known(ran: Ran, node: str) -> bool:
    """True if torch made a backward function: its names end in a number."""
    return node[-1:].isdecimal() or ran.name != node.removesuffix("Backward")


def _factor(ran: Ran) -> str:
    numbers = [n for n in ran.numbers if n]
    if numbers and len(ran.operands) < 2:
        return f"{numbers[0]:.4g}"
    named = [o for o in ran.operands if o.name]
    other = named[0] if named else min(ran.operands, key=lambda o: (o.count, -o.largest), default=None)
    if other is None:
        return "values"
    if len(ran.operands) > 1 and len({o.count for o in ran.operands}) == 1 and not named:
        other = max(ran.operands, key=lambda o: abs(math.log(o.rms)) if o.rms else 0.0)
    return _value(other)


def _value(size: Size) -> str:
    if size.count == 1 or size.largest <= 1.01 * size.least:
        number = f"{size.largest:.4g}"
    else:
        number = f"values of RMS {size.rms:.2g}"
    return f"{size.name!r}, {number}" if size.name else number


def _divisor(seen: Followed, ran: Ran) -> str:
    """Return what an operation divides by: `rms 2.1e-09 + 1e-08`."""
    if len(ran.operands) == 1:
        if ran.name.startswith("r") or not ran.numbers:  # a number divided by a tensor
            return f"values down to {ran.operands[0].least:.2g}"
        return f"{ran.numbers[0]:.4g}"
    if len(ran.operands) < 2:
        return "a number"
    divisor, source = ran.operands[1], ran.sources[1]
    made = _maker(seen, source)
    if made is None:
        return f"values down to {divisor.least:.2g}" if divisor.count > 1 else _value(divisor)
    if made.name in ("add", "radd") and made.numbers and len(made.operands) == 1:
        what = _what(seen, made.sources[0])
        return f"{what}{made.operands[0].least:.2g} + {made.numbers[0]:.2g}"
    return f"{_what(seen, source)}{divisor.least:.2g}"


def _what(seen: Followed, source: int | None) -> str:
    """Return what kind of size an operation computes, with a space: `rms `, `norm `, `std `; nothing for another."""
    made = _maker(seen, source)
    if made is None:
        return ""
    if made.name in ("clamp", "clamp_min", "maximum", "add", "expand", "expand_as", "unsqueeze") and made.sources:
        return _what(seen, made.sources[0])
    if made.name in ("norm", "vector_norm", "linalg_norm", "linalg_vector_norm"):
        return "norm "
    if made.name in ("std", "var"):
        return f"{made.name} "
    if made.name == "sqrt" and made.sources:
        inner = _maker(seen, made.sources[0])
        while inner is not None and inner.name in ("add", "clamp", "clamp_min") and inner.sources:
            inner = _maker(seen, inner.sources[0])
        return {"mean": "rms ", "sum": "norm ", "var": "std "}.get(inner.name if inner else "", "root ")
    return ""


def _maker(seen: Followed, source: int | None) -> Ran | None:
    return seen.ran[source] if source is not None and source >= 0 else None


def _before_softmax(seen: Followed, index: int) -> str:
    """Return that a product goes into a softmax, if it does."""
    carried = {index}
    for later in range(index + 1, min(index + 1 + FAR, len(seen.ran))):
        ran = seen.ran[later]
        if carried & set(ran.sources):
            if ran.name in ("softmax", "log_softmax"):
                return ", before a softmax"
            if ran.name in TRANSPARENT:
                carried.add(later)
    return ""
