"""Buffers that no checkpoint holds, recomputed: their float32 values, and whether a cast rounded the present ones.

`.half()` and `.to(torch.bfloat16)` cast every floating-point buffer; `from_pretrained(dtype=)` leaves rotary tables
and the like in float32. A cast buffer is recognised by its value: it equals the recomputed value, rounded.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hfpatch.compat import initial
from hfpatch.compat.modules import buffers, unsaved
from hfpatch.model.source import REJECTIONS
from hfpatch.model.survey import Survey
from hfpatch.model.walk import elements, inside, outers, starred, stock_class, without_copy
from hfpatch.model.wrapping import plain

HALF = (torch.float16, torch.bfloat16)

State = Literal["as made", "rounded", "uninitialised", "changed", "persistent"]

FARTHEST = 1e6
"""Ratio beyond which a value of a buffer is no variant of the recomputed one, but memory that was never written."""


@dataclass(frozen=True)
class Buffer:
    """A floating-point buffer.

    Attributes:
        path: Path of its module.
        module: Its module.
        name: Its name in the module.
        state: `as made`: equal to the recomputed value. `rounded`: equal to that value rounded to float16 or bfloat16.
            `uninitialised`: memory that was never written, as after `to_empty`. `changed`: another value, or it cannot
            be recomputed. `persistent`: it is in the state dict.
        exact: The recomputed float32 value, on the CPU; None if it is persistent or cannot be recomputed.
    """

    path: str
    module: nn.Module
    name: str
    state: State
    exact: torch.Tensor | None

    @property
    def value(self) -> torch.Tensor:
        """The present value."""
        value = buffers(self.module)[self.name]
        assert value is not None  # noqa: S101 - buffers that are None are not listed
        return value

    @property
    def place(self) -> str:
        """The buffer's path, with list indices replaced by `*`."""
        return starred(f"{self.path}.{self.name}" if self.path else self.name)


def floating_buffers(survey: Survey) -> tuple[Buffer, ...]:
    """Return every loaded floating-point buffer of an object, with its state. Changes nothing.

    Time: a build of each submodel on meta, about 3 ms a layer.
    """
    made = _as_loaded(survey, dict.fromkeys(survey.paths.values(), torch.float32))
    found: list[Buffer] = []
    for path, module in survey.modules.items():
        absent = unsaved(module)
        for name, value in buffers(module).items():
            if value is None or not value.is_floating_point() or value.is_meta:
                continue
            if name not in absent:
                found.append(Buffer(path, module, name, "persistent", None))
                continue
            exact = made.get((path, name))
            if exact is None:
                exact = _recomputed(module).get(name)
            found.append(Buffer(path, module, name, _state(value, exact), exact))
    return tuple(found)


def as_loaded(survey: Survey, dtype: torch.dtype | None = None) -> dict[tuple[str, str], torch.Tensor]:
    """Return the buffers that `from_pretrained(dtype=)` would leave, on the CPU, by module path and name.

    Args:
        survey: Survey of the object.
        dtype: Dtype in which the weights are loaded; by default the main dtype of each submodel.
    """
    held = {s.path: dtype or main_dtype(s.model) for s in survey.outermost_built}
    return _as_loaded(survey, held)


def main_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of most floating-point parameter elements of a module; float32 if it has none."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += elements(parameter)
    return max(sizes, key=sizes.__getitem__) if sizes else torch.float32


def is_frequencies(values: torch.Tensor) -> bool:
    """True if values are one row of numbers from 0 up that never rise, as the frequencies of a rotary table."""
    return values.dim() < 2 and bool((values >= 0).all()) and bool((values.flatten().diff() <= 0).all())


def holds(buffer: torch.Tensor, values: torch.Tensor) -> bool:
    """True if a buffer holds these values, in a dtype that is not narrower."""
    wide = buffer.element_size() >= values.element_size()
    return wide and buffer.shape == values.shape and torch.equal(_in_float32(buffer), values.float())


def is_rounding_of(buffer: torch.Tensor, exact: torch.Tensor) -> bool:
    """True if a buffer equals the exact values, rounded to float16 or bfloat16, or to one and then the other."""
    if buffer.shape != exact.shape:
        return False
    held, first = _in_float32(buffer), [exact.to(d) for d in HALF]
    chained = [a.to(b) for a in first for b in HALF]
    return any(torch.equal(held, r.float()) for r in (*first, *chained))


def _state(value: torch.Tensor, exact: torch.Tensor | None) -> State:
    if exact is None or exact.shape != value.shape or type(value.data) is not torch.Tensor:
        return "changed"
    held = _in_float32(value)
    if torch.equal(held, exact.float()):
        return "as made"
    if is_rounding_of(value, exact):
        return "rounded"
    return "uninitialised" if _never_written(held, exact.float()) else "changed"


def _in_float32(value: torch.Tensor) -> torch.Tensor:
    return value.detach().cpu().float()


def _never_written(held: torch.Tensor, exact: torch.Tensor) -> bool:
    """True if values can only be uninitialised memory.

    They are not finite, all zero, or somewhere nowhere near the recomputed ones; or they are frequencies with another
    sign or out of order.
    """
    if not bool(held.isfinite().all()) or not bool(held.any()):
        return True
    if is_frequencies(exact) and not is_frequencies(held):
        return True
    there = exact != 0
    ratio = (held[there] / exact[there]).abs()
    return bool(((ratio > FARTHEST) | (ratio < 1 / FARTHEST)).any())


def _as_loaded(survey: Survey, dtypes: dict[str, torch.dtype]) -> dict[tuple[str, str], torch.Tensor]:
    out: dict[tuple[str, str], torch.Tensor] = {}
    for submodel in survey.outermost_built:
        cls, start = stock_class(submodel.model), len(submodel.path) + 1 if submodel.path else 0
        wanted = {
            path: plain(without_copy(path[start:]), "base_layer", "token_adapter")
            for path, module in survey.below(submodel.path)
            if any(b.is_floating_point() for b in _unsaved_buffers(module).values())
        }
        if cls is None or not wanted:
            continue
        config, places = Settings(submodel.model.config), tuple(dict.fromkeys(wanted.values()))
        built = _built(cls, config, dtypes[submodel.path], places)
        for path, relative in wanted.items():
            twin, values = built.get(relative, (None, {}))
            if twin is type(survey.modules[path]):
                out.update({(path, name): value for name, value in values.items()})
    return out


class Settings:
    """A config, compared by its values."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config
        try:
            self.text = config.to_json_string(use_diff=False)
        except (*REJECTIONS, NotImplementedError):  # it holds what JSON does not know
            self.text = f"config {id(config)}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and (type(other.config), other.text) == (type(self.config), self.text)

    def __hash__(self) -> int:
        return hash(self.text)


@lru_cache(maxsize=32)
def _built(
    cls: type[PreTrainedModel], settings: Settings, dtype: torch.dtype, paths: tuple[str, ...]
) -> dict[str, tuple[type, dict[str, torch.Tensor]]]:
    """Return the class and the buffers of these modules of a new model. Nobody may write to them."""
    try:
        modules = dict(initial.without_weights(cls, settings.config, dtype).named_modules())
    except (*REJECTIONS, NotImplementedError):
        return {}
    return {p: (type(modules[p]), dict(_initialised_buffers(modules, p))) for p in paths if p in modules}


def _unsaved_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own buffers that are not in its state dict."""
    names = unsaved(module)
    return {n: b for n, b in buffers(module).items() if n in names and b is not None}


def _initialised_buffers(modules: Mapping[str, nn.Module], path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of a module of a model on meta, with the values that transformers initialises them to."""
    module = modules[path]
    owner = next(outer for outer in outers(path) if isinstance(modules[outer], PreTrainedModel))
    model: Any = modules[owner]
    fresh = {n: b for n, b in _unsaved_buffers(module).items() if b.is_floating_point()}
    for name, buffer in fresh.items():
        value = buffer if not buffer.is_meta else torch.full(buffer.shape, torch.nan, dtype=buffer.dtype, device="cpu")
        buffers(module)[name] = value
    for place in outers(path):  # some are initialised by a module around theirs
        if not inside(place, owner):
            return
        try:
            initial.fill(model, modules[place])
        except (*REJECTIONS, NotImplementedError):
            return
        values = {n: b for n in fresh if (b := buffers(module)[n]) is not None}
        if not any(v.is_meta or bool(v.isnan().any()) for v in values.values()):
            yield from values.items()
            return


def _recomputed(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a new module of the same class, if the module keeps all required arguments as attributes.

    Empty for modules with parameters: nothing is drawn, and nothing large is allocated.
    """
    if next(module.parameters(), None) is not None:
        return {}
    words: dict[str, Any] = {}
    for parameter in list(inspect.signature(type(module).__init__).parameters.values())[1:]:
        kept = parameter.name in module.__dict__ and not isinstance(module.__dict__[parameter.name], torch.Tensor)
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or parameter.name in ("device", "dtype"):
            continue
        if kept:
            words[parameter.name] = module.__dict__[parameter.name]
        elif parameter.default is parameter.empty:
            return {}
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), initial.default_dtype(torch.float32):
        try:
            made = type(module)(**words)
        except (*REJECTIONS, NotImplementedError):
            return {}  # its attributes are not its arguments
    return {n: b.float() for n, b in _unsaved_buffers(made).items() if b.is_floating_point()}
