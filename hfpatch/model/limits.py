"""Sizes that no model has, rejected before a config or model class spends time and memory on them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hfpatch.errors import InputError

LIMITS: tuple[tuple[re.Pattern[str], int], ...] = (
    (re.compile(r"(^|_)(layers|depths?|blocks|stages|cycles|loops)$|(^|_)n_layer$"), 1_500),
    (re.compile(r"heads?(_kv)?$"), 10_000),
    (re.compile(r"(experts|codebooks|quantizers)$"), 100_000),
    (re.compile(r"size|dim|vocab|channels|d_model|d_ff|positions?(_|$)|embeddings|^n_(embd|ctx|inner)$"), 100_000_000),
    (re.compile(r"^(n|num)_"), 1_000_000),
)
"""(config keys, largest value), the first match counts. Layers and the like are built one by one, and `num_labels`
becomes a dictionary; a plan tries attention with so many heads; other sizes cost nothing on meta, but overflow."""

_AT_LEAST = {"vocab_size": 1, "hidden_size": 1, "d_model": 1, "n_embd": 1, "num_hidden_layers": 0}
"""Smallest values: below these a class builds an empty model without an error."""

_EPS = re.compile(r"(^|_)eps(ilon)?$")

_SIZES = re.compile(r"(_size|_dim|_layers|_heads|_experts|^d_model|^n_embd|^n_head|^n_layer)$")


def check_sizes(values: Mapping[str, Any], name: str) -> None:
    """Reject a config if a size in it, or in a sub-config, is beyond the limits, or an eps is negative or not finite.

    Raises:
        InputError: A size is too large or too small, or an eps is negative, NaN or infinite; the message has its key
            and value.
    """
    for path, key, value in numbers(values):
        if _EPS.search(key) and not 0 <= value < math.inf:
            raise InputError(f"{name}: {path} is {value}, with which no norm gives a useful output; correct the config")
        if value < _AT_LEAST.get(key, -math.inf):
            raise InputError(f"{name}: {path} is {value:,}; want at least {_AT_LEAST[key]}, correct the config")
        most = next((limit for keys, limit in LIMITS if keys.search(key)), math.inf)
        if value > most:
            raise InputError(
                f"{name}: {path} is {value:,}, more than any model has (limit {most:,}); not built, correct the config"
            )


def suspects(values: Mapping[str, Any], error: BaseException) -> Iterator[tuple[str, Any]]:
    """Yield the fields that may have caused `error`: sizes below 1, and a text that is the key of a KeyError."""
    for path, key, value in _leaves(values):
        if isinstance(value, str):
            if isinstance(error, KeyError) and error.args == (value,):
                yield path, value
        elif value < 1 and _SIZES.search(key):
            yield path, value


def numbers(values: Any) -> Iterator[tuple[str, str, float]]:
    """Yield (dotted path, key, value) of every number in a config, its sub-configs and lists."""
    return ((path, key, value) for path, key, value in _leaves(values) if not isinstance(value, str))


def _leaves(value: Any, path: str = "", key: str = "", depth: int = 0) -> Iterator[tuple[str, str, Any]]:
    """Yield (dotted path, key, value) of every number and text in a config, its sub-configs and lists."""
    if isinstance(value, (int, float, str)):
        if not isinstance(value, bool):
            yield path, key, value
    elif depth > 32:
        return
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _leaves(item, path, key, depth + 1)
    elif isinstance(value, Mapping) or hasattr(type(value), "model_type"):
        for name, item in list((value if isinstance(value, Mapping) else vars(value)).items()):
            if item is not None:
                yield from _leaves(item, f"{path}.{name}" if path else str(name), str(name), depth + 1)
