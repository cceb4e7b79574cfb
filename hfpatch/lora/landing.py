"""Which tensors of a saved adapter fit a model: tried by PEFT's own loading, on a model without weights."""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from hfpatch.errors import InputError
from hfpatch.model.source import REJECTIONS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "default"
LEAST = 3
"""Names at the end that two keys must share for one to be taken for the other: `q_proj.lora_A.weight`."""
_OTHERS = {"lora_down": "lora_A", "lora_up": "lora_B"}
"""Names of other trainers -> PEFT's."""

Shape = tuple[int, ...]
Build = Callable[[], "PreTrainedModel"]


@dataclass(frozen=True)
class Landing:
    """What becomes of a saved adapter's tensors when PEFT loads them into a model.

    Attributes:
        wanted: Number of the adapter's parameters in the model.
        landed: Number of those that a tensor fills.
        unknown: Keys in the file that no parameter of the model takes.
        missing: Parameters that no tensor fills.
        shapes: Parameter -> the shapes in the file and in the model, where they differ.
        renaming: Beginnings of keys, and names of the halves -> what they would have to be; empty if none would do.
        renamed: Number of parameters that are filled after the renaming.
    """

    wanted: int
    landed: int
    unknown: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict[str, tuple[Shape, Shape]])
    renaming: Mapping[str, str] = field(default_factory=dict[str, str])
    renamed: int = 0


def landing(
    build: Build, config: Mapping[str, Any], shapes: Mapping[str, Shape], tick: Callable[[str], None]
) -> Landing:
    """Return what becomes of an adapter's tensors in a model.

    Args:
        build: Makes the model on meta, without adapters; called twice if keys do not land.
        config: The content of adapter_config.json.
        shapes: The shape of each tensor in the file.
        tick: Called with what is done next.

    Raises:
        InputError: PEFT has no adapter of that type, or cannot put it into this model.
    """
    found = _tried(build, config, shapes, tick)
    if not found.unknown or not found.missing:
        return found
    tick("looking for other names")
    beginnings = _beginnings(found.unknown, found.missing)
    again = _tried(build, config, {_renamed(key, beginnings): shape for key, shape in shapes.items()}, tick)
    if again.landed <= found.landed:
        return found
    renaming = {old: new for old, new in beginnings.items() if old != new}
    renaming |= {old: new for old, new in _OTHERS.items() if any(old in key.split(".") for key in shapes)}
    return replace(found, renaming=renaming, renamed=again.landed)


def _renamed(key: str, beginnings: Mapping[str, str]) -> str:
    """Return a key with its longest beginning that is known replaced, and with PEFT's names for the halves."""
    names = _plain(key).split(".")
    for end in range(len(names) - 1, -1, -1):
        if (new := beginnings.get(".".join(names[:end]))) is not None:
            return ".".join([new, *names[end:]] if new else names[end:])
    return ".".join(names)


def _tried(
    build: Build, config: Mapping[str, Any], shapes: Mapping[str, Shape], tick: Callable[[str], None]
) -> Landing:
    from peft import PeftConfig, get_peft_model, set_peft_model_state_dict

    tick("building the model")
    model = build()
    own = {id(p) for p in model.parameters()}
    values = {**config, "inference_mode": True}
    if "init_lora_weights" in values:
        values["init_lora_weights"] = True  # others compute with weights, of which there are none
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tick("putting the adapter into it")
            made: Any = PeftConfig.from_peft_type(**values)
            peft: Any = get_peft_model(model, made, adapter_name=ADAPTER, low_cpu_mem_usage=True)
            tick(f"loading {len(shapes):,} tensors into it")
            state = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
            wanted = {n: tuple(p.shape) for n, p in peft.named_parameters() if id(p) not in own}
            loaded: Any = set_peft_model_state_dict(
                peft, state, ADAPTER, ignore_mismatched_sizes=True, low_cpu_mem_usage=True
            )
        except REJECTIONS as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise InputError(f"PEFT cannot put this adapter into {type(model).__name__}: {first}") from error
    tick("looking which of them landed")
    missing = [n for n in loaded.missing_keys if n in wanted]
    foreign = [key for key in shapes if not _OTHERS.keys().isdisjoint(key.split("."))]  # PEFT drops them in silence
    given = {_plain(key): shape for key, shape in shapes.items()}
    unequal = {n: (given[_plain(n)], wanted[n]) for n in missing if given.get(_plain(n), wanted[n]) != wanted[n]}
    return Landing(
        wanted=len(wanted),
        landed=len(wanted) - len(missing),
        unknown=tuple(dict.fromkeys((*map(_plain, loaded.unexpected_keys), *foreign))),
        missing=tuple(n for n in missing if n not in unequal),
        shapes=unequal,
    )


def _plain(key: str) -> str:
    """Return a key as PEFT saves it: without the adapter's name, and with PEFT's names for the halves."""
    if ADAPTER not in key and not any(other in key for other in _OTHERS):
        return key
    names = [_OTHERS.get(name, name) for name in key.split(".")]
    for i, name in enumerate(names):
        if name.startswith("lora_") and names[i + 1 : i + 2] == [ADAPTER]:
            del names[i + 1]
            break
    return ".".join(names)


def _beginnings(unknown: tuple[str, ...], missing: tuple[str, ...]) -> dict[str, str]:
    """Return beginnings of unknown keys -> beginnings of missing parameters, where the ends tell which is which.

    Sorted by their names from the end, parameters that share most with a key lie beside its place.
    """
    ends = sorted(_plain(name).split(".")[::-1] for name in missing)
    votes: dict[str, Counter[str]] = {}
    for key in unknown:
        names = _plain(key).split(".")[::-1]
        place = bisect_left(ends, names)
        beside = [(_shared(names, other), other) for other in ends[max(0, place - 2) : place + 2]]
        longest = max((n for n, _ in beside), default=0)
        best = [other for n, other in beside if n == longest]
        if longest >= LEAST and len(best) == 1:
            old, new = (".".join(reversed(each[longest:])) for each in (names, best[0]))
            votes.setdefault(old, Counter())[new] += 1
    return {old: votes[old].most_common(1)[0][0] for old in sorted(votes, key=len, reverse=True)}


def _shared(one: list[str], other: list[str]) -> int:
    """Return the number of names that two lists share at their beginning."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
