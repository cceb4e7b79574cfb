"""Buffers that no checkpoint holds: the model computes them, so loading weights does not correct wrong values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hfpatch.compat.modules import buffers, unsaved
from hfpatch.dtypes import dtype_name
from hfpatch.model.survey import Survey
from hfpatch.model.walk import starred


@dataclass(frozen=True)
class Buffers:
    """Buffers outside the state dict that have one name, class and shape in every layer.

    `path` has list indices replaced by `*`; `shape` is the shape of each; `rotary` is True if they hold the frequencies
    or the table of a rotary position embedding.
    """

    path: str
    cls: str
    shape: tuple[int, ...]
    dtype: str
    rotary: bool
    count: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON: path, class (of the module that has them), shape, dtype, rotary, count."""
        return {"class" if k == "cls" else k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}


def buffers_made(survey: Survey) -> tuple[Buffers, ...]:
    """Return every kind of buffer that is not in an object's state dict, in module order. Changes nothing."""
    found: dict[tuple[str, str, tuple[int, ...], str, bool], int] = {}
    for path, module in survey.modules.items():
        own = buffers(module)
        for name in sorted(unsaved(module)):
            buffer = own.get(name)
            if buffer is None:
                continue
            cls = type(module).__name__
            place = starred(f"{path}.{name}" if path else name)
            dtype = dtype_name(buffer.dtype)
            key = (place, cls, tuple(buffer.shape), dtype, _is_rotary(cls, name, own))
            found[key] = found.get(key, 0) + 1
    return tuple(Buffers(*key, count) for key, count in found.items())


def _is_rotary(cls: str, name: str, own: Iterable[str]) -> bool:
    """True if a buffer belongs to a rotary embedding, by its name, its class or an `inv_freq` beside it."""
    beside = {*own, name}
    told = "rot" in cls.lower() or "rope" in cls.lower()
    return told or any("inv_freq" in other for other in beside) or name.startswith(("cos", "sin"))
