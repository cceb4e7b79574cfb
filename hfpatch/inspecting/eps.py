"""Every kind of normalisation layer in a model, and the source of its eps, which is proved and not guessed.

The class is rebuilt on meta from the config with each eps-like key set to a unique value; a norm with such a value
follows that key.
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
    """Norms of one class and eps that have the same place in every layer.

    `path` has list indices replaced by `*`. `source` is `config: <key>`, `class default` (of `__init__`),
    `hard-coded` (the class that holds the norm passes a number), `none (no eps)`, `added module`, or
    `unknown` (the model's class cannot be rebuilt). `as_built` is the eps that the class gives for this config;
    it differs from `eps` if the norm was changed since. `expected` has the eps keys, with their values, of the
    config of the transformers model around the norm: the keys that it should follow.
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
        """True if eps comes from the expected config; also without a key, without an eps, and for added modules."""
        owners = tuple(f"{FROM_CONFIG}{key.rpartition('.')[0]}" for key, _ in self.expected)
        # A key of a sub-config counts too: a tower that is not a transformers model follows its own config.
        return not owners or self.source in (NO_EPS, ADDED, UNKNOWN) or self.source.startswith(owners)

    @property
    def changed(self) -> bool:
        """True if the norm no longer has the eps it was built with."""
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
    """Return every kind of norm in an object, in module order. Changes nothing.

    Time: one build on meta of each outermost submodel with few layers, a few ms; a second, full build only
    if the first lacks a norm.
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
    """A submodel's class, rebuilt on meta from its config with marked eps values."""

    def __init__(self, submodel: Submodel, cls: type[PreTrainedModel]) -> None:
        self._prefix = len(starred(submodel.path))
        self._cls = cls
        self._config: PreTrainedConfig = submodel.model.config
        self._keys = list(eps_keys(self._config))
        taken = {float(value) for _, _, value in self._keys}
        fresh = (value for i in range(1, 1000) if (value := 1.0e-3 + i * 1.1e-6) not in taken)
        self._marked = dict(zip(fresh, self._keys, strict=False))

    def trace(self, path: str, module: nn.Module) -> tuple[str, float | None]:
        """Return the source of a norm's eps, and its value when built; `path` has list indices replaced by `*`."""
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
        """Return the eps keys of one config or sub-config, without those of its own sub-configs, with values."""
        return tuple((f"{owner}{key}", value) for owner, key, value in self._keys if _part(self._config, owner) is part)

    @cached_property
    def _short(self) -> dict[str, tuple[str, float | None]] | None:
        return self._norms(short=True)

    @cached_property
    def _full(self) -> dict[str, tuple[str, float | None]] | None:
        return self._norms(short=False)

    def _norms(self, *, short: bool) -> dict[str, tuple[str, float | None]] | None:
        """Return (class, eps) of each norm by starred path; None if the class rejects the changed config."""
        config: Any = copy.deepcopy(self._config)
        choose(config, "eager")  # no norm depends on it, and the one in use may not be installed
        try:
            if short:
                cut_layers(config)
            for marker, (owner, key, _) in self._marked.items():
                setattr(_part(config, owner), key, marker)
            with torch.device("meta"), torch.random.fork_rng(devices=[]):  # some classes still draw on the CPU
                model = self._cls(config)
        except REJECTIONS:
            return None
        return {starred(p): (type(m).__name__, eps_of(m)) for p, m in model.named_modules() if is_norm(m)}


def eps_keys(config: PreTrainedConfig, owner: str = "") -> Iterator[tuple[str, str, float]]:
    """Yield the eps-like keys of a config and its sub-configs: ("" or a prefix such as "text_config.", key, value)."""
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
    """Return the default of the eps argument of a norm's `__init__`; None if it has none."""
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        if "eps" in name and isinstance(parameter.default, float):
            return parameter.default
    return None
