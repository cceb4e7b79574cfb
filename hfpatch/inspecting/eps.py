"""Every kind of normalisation layer in a model, and where its eps comes from: proved, not guessed from equal values.

The class is rebuilt on meta from the config with each eps-like key set to a value of its own; a norm that
shows such a value follows that key.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hfpatch.compat.implementation import choose
from hfpatch.model.added import cut_layers
from hfpatch.model.norms import eps_name, eps_of, is_norm, same_eps
from hfpatch.model.source import REJECTIONS
from hfpatch.model.survey import Survey
from hfpatch.model.walk import Submodel, starred, stock_class, without_copy
from hfpatch.model.wrapping import plain

FROM_CONFIG = "config: "
CLASS_DEFAULT = "class default"
HARD_CODED = "hard-coded"
NO_EPS = "none (no eps)"
ADDED = "added module"
UNKNOWN = "unknown"

_EPS_KEY = re.compile(r"(?<!st)eps(ilon)?(_|$)")


@dataclass(frozen=True)
class NormKind:
    """Norms of one class at one place in every layer.

    `path` has list indices replaced by `*`. `source` is `config: <key>`, `class default` (of `__init__`),
    `hard-coded` (the class that holds the norm passes a number), `none (no eps)`, `added module`, or
    `unknown` (its class cannot be rebuilt). `as_built` is the eps that the class gives for this config;
    it differs from `eps` where the norm was changed since. `expected` are the eps keys, with their values, of the
    config that belongs to the transformers model around the norm: what one would expect it to follow.
    """

    path: str
    cls: str
    eps_name: str | None
    eps: float | None
    source: str
    as_built: float | None
    count: int
    expected: tuple[tuple[str, float], ...] = ()

    @property
    def follows(self) -> bool:
        """Whether eps comes from a key that one would expect; True also where no key is there to follow."""
        owners = tuple(f"{FROM_CONFIG}{key.rpartition('.')[0]}" for key, _ in self.expected)
        # A key of a part within that part is as good: a tower that is no model of its own follows its own config.
        return not owners or self.source in (NO_EPS, ADDED, UNKNOWN) or self.source.startswith(owners)

    @property
    def changed(self) -> bool:
        """Whether the norm no longer has the eps it was built with."""
        return self.eps is not None and self.as_built is not None and not same_eps(self.eps, self.as_built)

    def to_dict(self) -> dict[str, Any]:
        """As JSON: path, class, eps_name, eps, source, as_built, count, expected {config key: value}."""
        return {
            "path": self.path,
            "class": self.cls,
            "eps_name": self.eps_name,
            "eps": self.eps,
            "source": self.source,
            "as_built": self.as_built,
            "count": self.count,
            "expected": dict(self.expected),
        }


def norm_kinds(survey: Survey) -> tuple[NormKind, ...]:
    """Every kind of norm in an object, in module order. Nothing is changed.

    Time: one build on meta of each outermost submodel with few layers, some ms; a second, full one only
    where the short one lacks a norm.
    """
    rebuilt = {s.path: Rebuilt(s, cls) for s in survey.outermost_built if (cls := stock_class(s.model)) is not None}
    found: dict[tuple[str, str, str | None, float | None], list[nn.Module]] = {}
    for path, module in survey.modules.items():
        if is_norm(module) and not type(module).__module__.startswith("peft."):
            key = (starred(path), type(module).__name__, eps_name(module), eps_of(module))
            found.setdefault(key, []).append(module)
    kinds: list[NormKind] = []
    for (path, name, attribute, eps), modules in found.items():
        home = max((p for p in rebuilt if _within(path, starred(p))), key=len, default=None)
        source, built = (ADDED, None) if home is None else rebuilt[home].trace(_stock(survey, modules[0]), modules[0])
        around = survey.around(survey.path(modules[0]))
        expected = () if home is None or around is None else rebuilt[home].keys_of(around[1].config)
        kinds.append(NormKind(path, name, attribute, eps, source, built, len(modules), expected))
    return tuple(kinds)


def _stock(survey: Survey, module: nn.Module) -> str:
    return starred(survey.stock_path(survey.path(module)))


def _within(path: str, outer: str) -> bool:
    return outer == "" or path.startswith(f"{outer}.")


class Rebuilt:
    """A submodel's class built again, on meta, from its config with marked eps values."""

    def __init__(self, submodel: Submodel, cls: type[PreTrainedModel]) -> None:
        self._prefix = len(starred(submodel.path))
        self._cls = cls
        self._config: PreTrainedConfig = submodel.model.config
        self._keys = list(eps_keys(self._config))
        taken = {float(value) for _, _, value in self._keys}
        fresh = (value for i in range(1, 1000) if (value := 1.0e-3 + i * 1.1e-6) not in taken)
        self._marked = dict(zip(fresh, self._keys, strict=False))

    def trace(self, path: str, module: nn.Module) -> tuple[str, float | None]:
        """Where the eps of a norm at this starred path comes from, and what it is when built."""
        place = plain(without_copy(path[self._prefix :]), "base_layer").lstrip(".")
        name = type(module).__name__
        built = (self._short or {}).get(place) or (self._full or {}).get(place)
        if built is None or built[0] != name:
            return (UNKNOWN if self._full is None else ADDED), None
        if eps_name(module) is None:
            return NO_EPS, None
        marker = built[1]
        if marker in self._marked:
            owner, key, value = self._marked[marker]
            return f"{FROM_CONFIG}{owner}{key}", value
        default = _default(type(module))
        stays = default is not None and marker is not None and same_eps(default, marker)
        return (CLASS_DEFAULT if stays else HARD_CODED), marker

    def keys_of(self, part: PreTrainedConfig | None) -> tuple[tuple[str, float], ...]:
        """Eps keys of one part of the config, none of the parts in it, with values."""
        return tuple((f"{owner}{key}", value) for owner, key, value in self._keys if _part(self._config, owner) is part)

    @cached_property
    def _short(self) -> dict[str, tuple[str, float | None]] | None:
        return self._norms(short=True)

    @cached_property
    def _full(self) -> dict[str, tuple[str, float | None]] | None:
        return self._norms(short=False)

    def _norms(self, *, short: bool) -> dict[str, tuple[str, float | None]] | None:
        """(class, eps) of each norm by starred path; None where the class rejects the changed config."""
        config: Any = copy.deepcopy(self._config)
        choose(config, "eager")  # no norm depends on it, and this machine may lack the one set
        try:
            if short:
                cut_layers(config)
            for marker, (owner, key, _) in self._marked.items():
                setattr(_part(config, owner), key, marker)
            with torch.device("meta"), torch.random.fork_rng(devices=[]):  # some draw on the CPU all the same
                model = self._cls(config)
        except REJECTIONS:
            return None
        return {starred(p): (type(m).__name__, eps_of(m)) for p, m in model.named_modules() if is_norm(m)}


def eps_keys(config: PreTrainedConfig, owner: str = "") -> Iterator[tuple[str, str, float]]:
    """Keys of a config and its sub-configs that look like an eps: ("" or "text_config.", key, value)."""
    for key, value in vars(config).items():
        if isinstance(value, float) and _EPS_KEY.search(key.lower()):
            yield owner, key, value
        elif isinstance(value, PreTrainedConfig):
            yield from eps_keys(value, f"{owner}{key}.")


def _part(config: PreTrainedConfig, owner: str) -> PreTrainedConfig:
    part: Any = config
    for name in owner.split(".")[:-1]:
        part = getattr(part, name)
    return part


def _default(cls: type[nn.Module]) -> float | None:
    """The default of the eps argument of a norm's `__init__`."""
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        if "eps" in name and isinstance(parameter.default, float):
            return parameter.default
    return None
