"""Mutations of files: real bytes with flipped bits, and JSON with other types, names, sizes, depths and letters."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

from tests.hostile.traps import EVIL

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 255, 65_537, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.0, 0.5, 1e-300, 1e308,
    float("nan"), float("inf"), float("-inf"), "", " ", "x", "0", "1e3", "nan", "true", "None", "a" * 300,
    "é", "\u202e", "\ud800", "\0", "日本語", "../../etc/passwd", "/dev/zero", "somebody/kernel",
    "https://somebody.example/x", EVIL, f"{EVIL}.anything", [], {}, [[]], [None], {"": None},
    [0] * 50, {"a": {"b": {"c": []}}},
)  # fmt: skip
KEYS = (
    "", "x", "model_type", "auto_map", "attn_implementation", "_attn_implementation_internal", "configuration_files",
    "__class__", "__dict__", "self", "name_or_path", "dtype", "torch_dtype", "architectures", "quantization_config",
    "backbone", "text_config", "is", "of", "é", "\0",
)  # fmt: skip
TEXTS = (
    b"\0", b"\xff", b"\xc3", b"{", b"}", b"[", b"]", b'"', b"\\", b":", b",", b"-", b"- " * 200, b"[" * 2000,
    b"9" * 5000, b"NaN", b"1e999", b"\xef\xbb\xbf", b"&a ", b"*a", b"!!python/object:os.system ", b"!!int ", b"<<: ",
    b"0x", b"0o7", b"2001-13-45", b"\n", b"\t", b"\r", b"---\n", b"? ", b"| ", b"on", b"~", b"190:20:30",
    b".inf", "\u2028".encode(),
)  # fmt: skip


def bytes_of(raw: bytes, chance: Random) -> bytes:
    """Return other bytes: some flipped, cut, repeated or inserted."""
    data = bytearray(raw)
    for _ in range(chance.choice((1, 1, 1, 2, 5, 20))):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << chance.randrange(8)
            case 1 if at < len(data):
                data[at] = chance.randrange(256)
            case 2:
                del data[at:]
            case 3:
                del data[at : at + chance.randrange(1, 40)]
            case 4:
                data[at:at] = data[at : at + chance.randrange(1, 200)] * chance.choice((1, 3, 50))
            case _:
                data[at:at] = chance.choice(TEXTS)
    return bytes(data)


def value_of(value: Any, chance: Random) -> Any:
    """Return another JSON value: something in it is of another type, renamed, gone, or nested."""
    try:
        new = _changed(value, chance)
        json.dumps(new)
    except RecursionError:  # nested in what was nested
        return copy.deepcopy(chance.choice(ODD))
    return new


def _changed(value: Any, chance: Random) -> Any:
    new = copy.deepcopy(value)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        places = list(_places(new))
        if not places:
            return copy.deepcopy(chance.choice(ODD))
        holder, key = chance.choice(places)
        match chance.randrange(7):
            case 0 if isinstance(holder, dict):
                holder[chance.choice(KEYS)] = holder.pop(key)
            case 1 if isinstance(holder, dict):
                holder[chance.choice(KEYS)] = copy.deepcopy(chance.choice(ODD))
            case 2:
                del holder[key]
            case 3:
                inner = holder[key]
                for _ in range(chance.choice((1, 10, 100, 300))):
                    inner = [inner] if chance.random() < 0.5 else {"a": inner}
                holder[key] = inner
            case 4 if isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool):
                holder[key] = _number(holder[key], chance)
            case 5:
                other, at = chance.choice(places)
                if other is not holder and at in (other if isinstance(other, dict) else range(len(other))):
                    holder[key] = copy.deepcopy(other[at])
            case _:
                holder[key] = copy.deepcopy(chance.choice(ODD))
    return new


def like_of(value: Any, words: tuple[Any, ...], chance: Random) -> Any:
    """Return a JSON value of the same shape: a text, number or flag in it is another of its type, or one of words."""
    new = copy.deepcopy(value)
    leaves = [(holder, key) for holder, key in _places(new) if not isinstance(holder[key], (dict, list))]
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        holder, key = chance.choice(leaves)
        pool = [other[at] for other, at in leaves] + [*words, *ODD]
        alike = [each for each in pool if type(each) is type(holder[key]) and each != holder[key]]
        if alike:
            holder[key] = chance.choice(alike)
    return new


def json_of(value: Any, chance: Random) -> bytes:
    """Return the bytes of another JSON value, and now and then of something that is not quite JSON."""
    raw = json.dumps(value_of(value, chance)).encode()
    return bytes_of(raw, chance) if chance.random() < 0.3 else raw


def _number(value: float, chance: Random) -> Any:
    changes: tuple[Callable[[float], Any], ...] = (
        lambda v: -v, lambda v: v * 10, lambda v: v * 1e6, lambda v: v * 10**12, lambda v: v + 1, lambda v: v - 1,
        float, str, lambda v: [v], lambda v: v / 3, bool,
    )  # fmt: skip
    return chance.choice(changes)(value)


def _places(value: Any, depth: int = 0) -> Any:
    if depth < 40 and isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key], depth + 1)
