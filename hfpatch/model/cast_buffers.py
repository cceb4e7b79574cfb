"""Buffers that a cast of the whole model rounded, or that were never written, and what `from_pretrained` would leave.

A model loaded with `from_pretrained(dtype=)` has its rotary tables in float32, and some scales and sinusoids in the
dtype of its weights. After `.half()`, `.to(torch.bfloat16)` or a Trainer's `bf16_full_eval` all are in half precision.
"""

from __future__ import annotations

import dis
import inspect
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from hfpatch.compat import loading
from hfpatch.compat.modules import buffers, unsaved
from hfpatch.model.rebuilt import HALF, Buffer, as_loaded, floating_buffers, holds, is_frequencies, main_dtype
from hfpatch.model.survey import Survey
from hfpatch.model.walk import inside, is_stock, starred
from hfpatch.model.wrapping import plain

Place = tuple[str, str]
"""Path of a module, and the name of a buffer in it."""

NEVER_WRITTEN = "never written (uninitialised memory)"
STORED = "in the state dict, so only the checkpoint has its lost digits: load it again with from_pretrained(dtype=)"
OTHER = "it is not what its class computes, rounded, so something else set it"
AWAY = "its values are not in this process (offloaded, or not loaded)"
SET = "the forward of its module sets it"
OWN = "its module is not transformers' own, so no loader says which dtype its forward expects"
UNKNOWN = "neither a new model nor a new module of its class tells what it should hold"
UNFILLED = "a new model of the installed transformers does not tell what it should hold"


@dataclass(frozen=True)
class Cast:
    """A buffer that holds less than `from_pretrained(dtype=)` leaves.

    Attributes:
        path: Path of its module.
        module: Its module.
        name: Its name in the module.
        values: What the loader leaves, on the CPU.
        error: Relative L2 distance of the present values from these; infinite for uninitialised memory.
    """

    path: str
    module: nn.Module
    name: str
    values: torch.Tensor
    error: float

    @property
    def place(self) -> str:
        """The buffer's path, with list indices replaced by `*`."""
        return place(self.path, self.name)


@dataclass(frozen=True)
class CastBuffers:
    """The buffers of an object that a cast touched.

    Attributes:
        cast: Those that can be restored to what the loader leaves.
        rounded: Those that the loader rounds too, with their float32 values.
        left: Path -> why a buffer in half precision, or one whose values are unknown, cannot be restored.
    """

    cast: tuple[Cast, ...] = ()
    rounded: tuple[Cast, ...] = ()
    left: tuple[tuple[str, str], ...] = ()

    @property
    def unfilled(self) -> tuple[tuple[str, str], ...]:
        """Those of `left` of which nothing tells what the loader would leave in them."""
        return tuple((place, why) for place, why in self.left if why == UNFILLED)


def described(found: Iterable[Cast]) -> str:
    """Return number, places and largest error of buffers, as a phrase; empty if there are none."""
    cast = list(found)
    if not cast:
        return ""
    worst = max(cast, key=lambda c: c.error)
    off = NEVER_WRITTEN if worst.error == math.inf else f"off by {worst.error:.2g} of its size"
    others = list(dict.fromkeys(c.place for c in cast if c.place != worst.place))
    more = f", and {others[0]}" if len(others) == 1 else f", and {len(others)} more kinds" if others else ""
    return f"{len(cast)} buffer{'s' if len(cast) > 1 else ''}: {worst.place} ({off}){more}"


def in_float16(survey: Survey) -> bool:
    """True if a transformers model in an object has float16 weights."""
    return any(main_dtype(submodel.model) == torch.float16 for submodel in survey.outermost_built)


def place(path: str, name: str) -> str:
    """Return a buffer's path without the names of wrappers, with list indices replaced by `*`."""
    return starred(plain(f"{path}.{name}" if path else name, "module", "base_model"))


def cast_buffers(survey: Survey) -> CastBuffers:
    """Return the buffers that a cast rounded, or that were never written. Changes nothing; computed once per survey.

    Time: one look at each buffer; if one may have been cast, a build of each submodel on meta, about 1 ms a layer.
    """
    return survey.once("cast buffers", lambda: _cast_buffers(survey))


def _cast_buffers(survey: Survey) -> CastBuffers:
    left = {**_stored(survey), **_offloaded(survey)}
    suspects = {(p, n) for p, m in survey.modules.items() for n in unsaved(m) if _suspect(buffers(m).get(n))}
    if not suspects:
        return CastBuffers(left=tuple(left.items()))
    loaded = as_loaded(survey)
    found = [b for b in floating_buffers(survey) if (b.path, b.name) in suspects]
    cast: list[Cast] = []
    rounded: list[Cast] = []
    for buffer in found:
        wanted = loaded.get((buffer.path, buffer.name))
        if wanted is not None and holds(buffer.value, wanted):
            if buffer.exact is not None and not torch.equal(wanted.float(), buffer.exact):
                rounded.append(_cast(buffer, buffer.exact))
        elif buffer.name in _assigned(type(buffer.module)):
            left[buffer.place] = SET
        elif buffer.state == "changed":
            if buffer.value.dtype in HALF:
                left[buffer.place] = UNKNOWN if buffer.exact is None else OTHER
        elif wanted is not None and buffer.state != "as made":
            cast.append(_cast(buffer, wanted))
        elif wanted is None and buffer.state in ("rounded", "uninitialised"):
            left[buffer.place] = UNFILLED if _of_a_loader(survey, buffer) else OWN
    return CastBuffers(tuple(cast), tuple(rounded), tuple(left.items()))


def _of_a_loader(survey: Survey, buffer: Buffer) -> bool:
    """True if a buffer is in a module of transformers, inside a model that its loader builds."""
    return is_stock(type(buffer.module)) and any(inside(buffer.path, s.path) for s in survey.outermost_built)


def without_values(survey: Survey) -> bool:
    """True if a buffer of no checkpoint is on meta, so that nothing tells what it will hold."""
    found = (buffers(module).get(name) for module in survey.modules.values() for name in unsaved(module))
    return any(value is not None and value.is_meta and value.is_floating_point() for value in found)


@cache
def _assigned(cls: type[nn.Module]) -> frozenset[str]:
    """Return the names of the attributes that a class's forward sets."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR") if code else frozenset()


def _cast(buffer: Buffer, wanted: torch.Tensor) -> Cast:
    size = float(wanted.double().norm())
    error = float((buffer.value.detach().cpu().double() - wanted.double()).norm()) / size if size else 0.0
    never = buffer.state == "uninitialised"
    return Cast(buffer.path, buffer.module, buffer.name, wanted, math.inf if never else error)


def _suspect(value: torch.Tensor | None) -> bool:
    """True if a buffer's values alone allow that it was cast or never written."""
    if value is None or not value.is_floating_point() or value.is_meta or not value.numel():
        return False
    if value.dtype in HALF:
        return True
    held = value.detach().float()
    size = held.abs()
    if value.dim() < 2 and not is_frequencies(held):
        return True
    odd = ~(size < torch.finfo(torch.float16).max) | ((size < 1e-12) & (held != 0))
    return bool(odd.any()) or not bool(held.any()) or any(torch.equal(held.to(d).float(), held) for d in HALF)


def _stored(survey: Survey) -> dict[str, str]:
    """Return the persistent buffers that the loader would keep in float32 and that are in half precision."""
    out: dict[str, str] = {}
    for submodel in survey.outermost_built:
        loose, strict = loading.kept_wide(submodel.model)
        patterns = loose | strict if main_dtype(submodel.model) == torch.float16 else strict
        if not patterns:
            continue
        kept = re.compile("|".join(p.replace("*", ".*") for p in sorted(patterns)))  # as the loader matches
        for path, module in survey.modules.items():
            gone = unsaved(module)
            for name, value in buffers(module).items():
                half = value is not None and value.dtype in HALF and name not in gone
                if half and inside(path, submodel.path) and kept.search(f"{path}.{name}"):
                    out[place(path, name)] = STORED
    return out


def _offloaded(survey: Survey) -> dict[str, str]:
    """Return the buffers of no checkpoint that are on meta although the model's weights are loaded."""
    if all(p.is_meta for p in survey.root.parameters()):
        return {}
    return {
        place(path, name): AWAY
        for path, module in survey.modules.items()
        for name in sorted(unsaved(module))
        if (value := buffers(module).get(name)) is not None and value.is_meta and value.is_floating_point()
    }
