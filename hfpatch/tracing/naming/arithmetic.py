"""Results that are not finite by the rules of arithmetic: 0 x inf, inf - inf, a division by 0, a gradient at a pole."""

from __future__ import annotations

from hfpatch.compat import operators
from hfpatch.dtypes import dtype_name
from hfpatch.tracing.naming.origin import Operand, Origin

ADDITIONS = {"add", "sub", "rsub"}
MATMULS = operators.MATMULS | {"mm", "bmm", "addmm", "baddbmm", "mv", "dot", "matmul", "linear"}
POWERS = {"pow", "square"}
SUMS = {"sum", "mean", "cumsum", "logsumexp", "nansum"}
POLES = {
    "Sqrt": "sqrt at 0",
    "Rsqrt": "rsqrt at 0",
    "Log": "log at 0",
    "Log2": "log2 at 0",
    "Log10": "log10 at 0",
    "Log1P": "log1p at -1",
    "Pow": "a power at 0",
    "Reciprocal": "1 / x at 0",
    "Asin": "asin at 1",
    "Acos": "acos at 1",
    "Acosh": "acosh at 1",
    "Atanh": "atanh at 1",
    "Atan2": "atan2 at (0, 0)",
}
"""Backward functions, without `Backward0`, whose gradient is infinite at a point; each with function and point."""

Why = tuple[str, str]
"""A symptom and a cause in a sentence."""


def indefinite(origin: Origin) -> str | None:
    """Return the form of a NaN whose operands are not NaN, such as `0 x -inf is NaN`; None if it has no such form."""
    if origin.holds != "nan":
        return None
    values = [o.at for o in origin.operands]
    if origin.name == "mul":
        factors = [*values, *origin.numbers][:2]
        return _form(" x ", factors) if len(factors) == 2 else None
    if origin.name in ADDITIONS and len(values) > 1:
        return _form(" + " if origin.name == "add" else " - ", values[:2])
    if origin.name in ("div", "true_divide"):
        return _form(" / ", [*values, *origin.numbers][:2])
    if origin.name in MATMULS and origin.terms:
        return f"a sum of products holds {origin.terms}, which is NaN"
    if origin.name in SUMS and any(o.nonfinite for o in origin.operands):
        return "a sum holds inf - inf, which is NaN"
    return None


def _form(sign: str, values: list[float | None]) -> str | None:
    if any(v is None for v in values):
        return None
    return f"{sign.join(_number(v) for v in values if v is not None)} is NaN"


def _number(value: float) -> str:
    return f"{value:.3g}" if value else "0"


def pole(origin: Origin) -> Why | None:
    """Return the cause of a gradient taken where it is infinite; None of other operations."""
    words = POLES.get(origin.node.rpartition("Backward")[0]) if origin.node else None
    divisor = origin.operands[-1] if origin.operands else None
    if words is None or divisor is None or _value(divisor) != 0:
        return None
    return "division-by-zero", f"the gradient of {words} is infinite"


def power(origin: Origin) -> Why | None:
    """Return the cause of a power that is not defined; None if it is too large."""
    base = origin.operands[0].at if origin.operands else None
    exponent = next(iter(origin.numbers), None) if len(origin.operands) < 2 else origin.operands[1].at
    if base is None or exponent is None:
        return None
    if base == 0 and exponent < 0:
        return "division-by-zero", f"0 to the power of {exponent:.3g}"
    if base < 0 and origin.holds == "nan":
        return "out-of-domain", f"{base:.3g} to the power of {exponent:.3g}"
    return None


def division(origin: Origin, *, norm: bool) -> Why | None:
    """Return the cause of a division by 0 or a reciprocal root of 0; None if the divisor is not 0.

    Args:
        origin: The division.
        norm: True if its module acts as a norm.
    """
    divisor = origin.operands[-1] if origin.operands else None
    by = next(iter(origin.numbers), None) if divisor is not None and len(origin.operands) < 2 else None
    fraction = origin.name in ("div", "true_divide")
    if fraction and by is not None:
        return ("division-by-zero", "a division by the number 0") if by == 0 else None
    if divisor is None or _value(divisor) != 0:
        return None
    if origin.vanished is not None:
        eps = f"the eps {origin.vanished:g} is 0 in {dtype_name(origin.result)}"
        return "eps-underflow", f"{eps}, so the divisor can be 0"
    lead = "0 / 0" if origin.holds == "nan" else "a division by 0"
    symptom, what = _zero(divisor, norm=norm)
    if norm and symptom == "division-by-zero":
        return "zero-norm", "a row of zeros, and no eps, so the divisor is 0"
    return symptom, f"{lead}: the divisor is {what}" if what else lead


def _zero(divisor: Operand, *, norm: bool) -> Why:
    """Return the symptom of a divisor that is 0, and what it is, from the operations that made it."""
    made = set(divisor.made)
    if made & {"linalg_vector_norm", "norm"}:
        return "zero-norm", "the norm of a row of zeros, without an eps"
    if made & {"std", "var", "std_mean", "var_mean"}:
        return "zero-norm", "the std of a constant row, without an eps"
    if made & {"sum", "mean"} and made & {"pow", "square"}:
        return "zero-norm", "the mean square of a row of zeros, without an eps"
    if "sum" in made and not norm and divisor.counts:
        return "empty-mean", "a sum of a mask that is 0, so the mean is over nothing, such as a row of padding only"
    if "sum" in made:
        return "division-by-zero", "a sum that is 0"
    return "division-by-zero", ""


def _value(operand: Operand) -> float:
    """Return an operand's value at the first bad element, or else its least magnitude."""
    return operand.least if operand.at is None else operand.at
