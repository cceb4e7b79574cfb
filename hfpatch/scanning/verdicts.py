"""What a tensor holds, as findings and notes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hfpatch.scanning.header import Tensor
from hfpatch.scanning.result import Found

if TYPE_CHECKING:
    from hfpatch.scanning.values import Values

OUTLIER = 50.0
"""Times its tensor's RMS beyond which the largest magnitude is told; of a million normal numbers it is 5."""

SHARE = 1e-3
"""Of a tensor's values, beyond which those that float16 turns into 0 are told: a few are in every large tensor."""


def findings(file: str, tensor: Tensor, values: Values) -> list[Found]:
    """NaN and infinities of a tensor."""
    found: list[Found] = []
    of = f"of {_values(tensor):,} {tensor.dtype} values"
    if values.nan:
        found.append(Found("NaN", file, tensor.name, f"{values.nan:,} {of}", {"count": values.nan}))
    if values.posinf or values.neginf:
        text = f"{values.posinf:,} +Inf and {values.neginf:,} -Inf {of}"
        found.append(Found("Inf", file, tensor.name, text, {"positive": values.posinf, "negative": values.neginf}))
    return found


def notes(file: str, tensor: Tensor, values: Values) -> list[Found]:
    """What is no fault of a tensor and worth knowing."""
    if not values.nonzero:
        text = f"{_values(tensor):,} {tensor.dtype} values; right for a fresh LoRA B and many biases"
        return [Found("all zero", file, tensor.name, text, {"count": _values(tensor)})]
    found: list[Found] = []
    if values.beyond:
        text = f"{values.beyond:,} values beyond 65,504, up to {values.largest:.6g}" + (
            ": inf as float16" if values.largest >= 65520 else ", which float16 rounds down to it"
        )
        figures = {"count": values.beyond, "largest": values.largest}
        found.append(Found("beyond float16", file, tensor.name, text, figures))
    if values.sampled and values.tiny > SHARE * values.sampled:
        share = values.tiny / values.sampled
        text = f"about {share:.2g} of its values become 0 as float16"
        found.append(Found("small for float16", file, tensor.name, text, {"share": share}))
    rms = _rms(tensor, values)
    if rms and values.largest > OUTLIER * rms:
        ratio = values.largest / rms
        text = f"its largest magnitude, {values.largest:.4g}, is about {ratio:,.0f} times its RMS, {rms:.3g}"
        figures = {"largest": values.largest, "rms": rms, "ratio": ratio}
        found.append(Found("outlier", file, tensor.name, text, figures))
    return found


def sorted_notes(found: Iterable[Found]) -> tuple[Found, ...]:
    """By kind, those of the largest figures first."""
    kinds = ["not scanned", "beside shards", "no tensor", "beyond float16", "small for float16", "outlier", "all zero"]
    key = {"beyond float16": "largest", "small for float16": "share", "outlier": "ratio", "all zero": "count"}
    return tuple(sorted(found, key=lambda f: (kinds.index(f.kind), -f.figures.get(key.get(f.kind, ""), 0.0))))


def _rms(tensor: Tensor, values: Values) -> float:
    """Of the sample; at least what the largest element alone makes of it, if the sample missed that."""
    if not values.sampled or not math.isfinite(values.squares):
        return 0.0
    return max(math.sqrt(values.squares / values.sampled), values.largest / math.sqrt(_values(tensor)))


def _values(tensor: Tensor) -> int:
    return tensor.size * 2 if tensor.dtype == "C64" else tensor.size
