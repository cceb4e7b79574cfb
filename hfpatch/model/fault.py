"""Finds the config field that made a model class fail, by building again and recording the fields it reads."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedConfig

Read = tuple[str, str, Any]
"""(dotted path of a sub-config, with a final dot, or empty; key; value)"""

MISSING = object()
_STAND_INS: tuple[Any, ...] = (64, {}, [0])
"""Values tried in place of None: a size, a table, a list."""
_TRIES = 8


def field_at_fault(
    config: PreTrainedConfig,
    build: Callable[[PreTrainedConfig], object],
    error: Exception,
    failures: tuple[type[Exception], ...],
) -> str:
    """Return the field that made a build fail, as a phrase: `text_config.head_dim is None`.

    A field that is None counts if another value in its place changes how the build ends.

    Args:
        config: The config of the failed build; copied, not changed.
        build: Builds the model; called at most 25 times more.
        error: The exception it raised.
        failures: Exceptions it may raise.

    Returns:
        The phrase; empty if no field was found.
    """
    reads = _reads(config, build, failures)
    text = str(error)
    if isinstance(error, AttributeError) and reads and (missing := [r for r in reads if r[2] is MISSING]):
        path, key, _ = missing[-1]
        if repr(key) in text:
            return f"{path}{key} is missing"
    if "None" in text or isinstance(error, TypeError):
        return _that_is_none(config, build, text, failures, reads)
    if isinstance(error, KeyError):
        return _table_without(error.args[0], reads[-1]) if reads else ""
    numbers = [int(n) for n in re.findall(r"(?<![\w.])\d+(?![\w.])", text)]
    named = {n: f"{p}{k} is {n}" for p, k, v in reads for n in numbers if v == n and isinstance(v, int) and n > 1}
    return ", ".join(named[n] for n in dict.fromkeys(numbers) if n in named)


def _table_without(key: object, read: Read) -> str:
    """Return the table read last, as a phrase, if it has the key neither as a key nor as a value; else empty."""
    path, name, table = read
    if not isinstance(table, Mapping) or key in table or key in table.values():
        return ""
    return f"{path}{name} has no {key!r}"


def _that_is_none(
    config: PreTrainedConfig,
    build: Callable[[PreTrainedConfig], object],
    text: str,
    failures: tuple[type[Exception], ...],
    reads: list[Read],
) -> str:
    empty = list(dict.fromkeys((path, key) for path, key, value in reversed(reads) if value is None))
    for path, key in empty[:_TRIES]:
        for value in _STAND_INS:
            changed: Any = copy.deepcopy(config)
            part = changed
            for name in path.split(".")[:-1]:
                part = getattr(part, name)
            try:
                setattr(part, key, value)
                build(changed)
            except failures as other:
                if str(other) == text:
                    continue
            return f"{path}{key} is None"
    return ""


def _reads(
    config: PreTrainedConfig, build: Callable[[PreTrainedConfig], object], failures: tuple[type[Exception], ...]
) -> list[Read]:
    """Return the fields of a config and its sub-configs that a build reads until it fails, in order."""
    reads: list[Read] = []
    watched = copy.deepcopy(config)
    _watch(watched, "", reads)
    with contextlib.suppress(*failures):
        build(watched)
    return reads


def _watch(config: PreTrainedConfig, path: str, reads: list[Read]) -> None:
    """Record the fields read from this config and its sub-configs; their class becomes a subclass of the same name."""
    cls = type(config)

    def note(self: Any, key: str) -> Any:
        try:
            value = cls.__getattribute__(self, key)
        except AttributeError:
            reads.append((path, key, MISSING))
            raise
        if not key.startswith("_") and not callable(value):
            reads.append((path, cls.attribute_map.get(key, key), value))
        return value

    for name, part in vars(config).items():
        if isinstance(part, PreTrainedConfig):
            _watch(part, f"{path}{name}.", reads)
    config.__class__ = type(cls.__name__, (cls,), {"__getattribute__": note, "__module__": cls.__module__})
