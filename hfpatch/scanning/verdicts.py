"""Findings and notes about the values of a tensor."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hfpatch.scanning.header import Tensor
from hfpatch.scanning.result import Found

if TYPE_CHECKING:
    from hfpatch.scanning.values import Values

OUTLIER = 50.0
"""Ratio of the largest magnitude to the RMS above which it is noted; for a million normal numbers it is about 5."""

SHARE = 1e-3
"""Share of values that become 0 in float16 above which it is noted: every large tensor has a few."""


_WHOLE = re.compile(r"[IU]\d+|BOOL")


def codes(tensors: Iterable[Tensor], method: str) -> list[Found]:
    """Return a note on the integers of a checkpoint whose config names a method of quantisation; none without it."""
    found = [t for t in tensors if _WHOLE.fullmatch(t.dtype)]
    if not found or not method:
        return []
    size = sum(_values(t) for t in found)
    text = (
        f"{len(found)} tensors with {size:,} integers hold the codes of weights quantised by {method}: "
        "they were counted, and what they stand for was not looked at"
    )
    return [Found("quantised", "config.json", "", text, {"count": size})]


def findings(file: str, tensor: Tensor, values: Values) -> list[Found]:
    """Return the findings about a tensor: NaN and infinities."""
    found: list[Found] = []
    of = f"of {_values(tensor):,} {tensor.dtype} values"
    if values.nan:
        found.append(Found("NaN", file, tensor.name, f"{values.nan:,} {of}", {"count": values.nan}))
    if values.posinf or values.neginf:
        text = f"{values.posinf:,} +Inf and {values.neginf:,} -Inf {of}"
        found.append(Found("Inf", file, tensor.name, text, {"positive": values.posinf, "negative": values.neginf}))
    return found


def notes(file: str, tensor: Tensor, values: Values) -> list[Found]:
    """Return the notes about a tensor: facts worth knowing that are no fault."""
    if not values.nonzero:
        normal = "" if _WHOLE.fullmatch(tensor.dtype) else "; normal for an untrained LoRA B and many biases"
        text = f"{_values(tensor):,} {tensor.dtype} values{normal}"
        return [Found("all zero", file, tensor.name, text, {"count": _values(tensor)})]
    found: list[Found] = []
    if values.beyond:
        text = f"{values.beyond:,} values beyond 65,504, up to {values.largest:.6g}" + (
            ": infinite in float16" if values.largest >= 65520 else ", which float16 rounds down to 65,504"
        )
        figures = {"count": values.beyond, "largest": values.largest}
        found.append(Found("beyond float16", file, tensor.name, text, figures))
    if values.sampled and values.tiny > SHARE * values.sampled:
        share = values.tiny / values.sampled
        text = f"a share of about {share:.2g} of its values becomes 0 in float16"
        found.append(Found("small for float16", file, tensor.name, text, {"share": share}))
    rms = _rms(tensor, values)
    if rms and values.largest > OUTLIER * rms:
        ratio = values.largest / rms
        text = f"its largest magnitude, {values.largest:.4g}, is about {ratio:,.0f} times its RMS, {rms:.3g}"
        figures = {"largest": values.largest, "rms": rms, "ratio": ratio}
        found.append(Found("outlier", file, tensor.name, text, figures))
    return found


def sorted_notes(found: Iterable[Found]) -> tuple[Found, ...]:
    """Return notes sorted by kind, and in a kind by their figure, largest first."""
    kinds = [
        "quantised",
        "not scanned",
        "beside shards",
        "no tensor",
        "beyond float16",
        "small for float16",
        "outlier",
        "all zero",
    ]
    key = {"beyond float16": "largest", "small for float16": "share", "outlier": "ratio", "all zero": "count"}
    return tuple(sorted(found, key=lambda f: (kinds.index(f.kind), -f.figures.get(key.get(f.kind, ""), 0.0))))


def _rms(tensor: Tensor, values: Values) -> float:
    """Return the RMS of the sample, or that of the largest element alone if it is larger (the sample may miss it)."""
    if not values.sampled or not math.isfinite(values.squares):
        return 0.0
    return max(math.sqrt(values.squares / values.sampled), values.largest / math.sqrt(_values(tensor)))


def _values(tensor: Tensor) -> int:
    return tensor.size * 2 if tensor.dtype == "C64" else tensor.size
