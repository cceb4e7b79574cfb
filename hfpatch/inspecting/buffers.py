"""Buffers that no checkpoint holds: a model makes them itself, and what made them wrong no file can mend."""

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
    """Buffers of one name, class and shape at one place in every layer, that are not in the state dict.

    `path` has list indices replaced by `*`; `rotary` says whether they hold the frequencies, or the table, of a rotary
    position embedding. `shape` is that of each.
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
    """Every kind of buffer in an object that is not in its state dict, in module order. Reads only."""
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
    """Frequencies go by `inv_freq` wherever there are some, and what is kept beside them goes with them."""
    beside = {*own, name}
    told = "rot" in cls.lower() or "rope" in cls.lower()
    return told or any("inv_freq" in other for other in beside) or name.startswith(("cos", "sin"))
