"""What differs between two models as they stand, without running them: weights, attributes, configs, classes, modes."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType, MethodType
from typing import Any, Literal

import torch
from torch import nn

from hfpatch.comparing.lined_up import Pair, Side, common
from hfpatch.comparing.weights import Weight, stored, ties, weights
from hfpatch.compat import accelerate, peft
from hfpatch.compat.implementation import chosen
from hfpatch.dtypes import dtype_name
from hfpatch.model.attention import eager_function
from hfpatch.model.norms import EPS_NAMES
from hfpatch.model.rebuilt import main_dtype
from hfpatch.patching.proofs.bodies import digest
from hfpatch.patching.record import logged, state_of

Kind = Literal[
    "weight", "tie", "buffer", "eps", "attribute", "dropout", "mode", "class", "adapter", "attention", "config",
    "patch", "dtype", "parts",
]  # fmt: skip

PLAIN = (bool, int, float, str, type(None), torch.dtype)
LEFT_OUT = frozenset({"training", "gradient_checkpointing", "name_or_path", "warnings_issued", "T_destination"})
"""Attributes that do not change what a module computes, or that other facts tell."""
UNSAID = frozenset({"transformers_version", "dtype", "torch_dtype", "architectures", "name_or_path"})
"""Keys of a config that tell where it came from, or what other facts tell."""
DROPS = re.compile(r"drop|^p$")


@dataclass(frozen=True)
class Fact:
    """One thing that differs.

    Attributes:
        kind: What it is.
        path: Common path of the module that it is of; of the submodel for a config.
        name: Name of the tensor, attribute or key; empty where the kind says all.
        a, b: What A and B have, as text.
        distance: Relative L2 distance of tensors; None for others.
        effect: What the run showed of it, as a sentence; empty if the run does not tell.
        tried: True if a block with A's value in the place of B's agreed with A's block.
        values: What A and B have, to be tried.
    """

    kind: Kind
    path: str
    name: str
    a: str
    b: str
    distance: float | None = None
    effect: str = ""
    tried: bool = False
    values: tuple[Any, Any] = field(default=(None, None), compare=False, repr=False)

    @property
    def place(self) -> str:
        """Path and name."""
        return ".".join(filter(None, (self.path, self.name)))

    def to_dict(self) -> dict[str, Any]:
        """Return the fact for JSON."""
        finite = self.distance if self.distance is not None and self.distance < float("inf") else None
        keys = ("kind", "path", "name", "a", "b", "effect", "tried")
        return {**{k: getattr(self, k) for k in keys}, "distance": finite}


@dataclass(frozen=True)
class Facts:
    """Everything that differs, and what was compared.

    Attributes:
        found: The facts.
        weights: Every parameter and buffer, with its state.
        unsaved: Path and name of buffers that no checkpoint holds, in either model.
    """

    found: tuple[Fact, ...]
    weights: tuple[Weight, ...]
    unsaved: frozenset[tuple[str, str]]


def facts(pair: Pair) -> Facts:
    """Return what differs between two models. Reads every tensor once; changes nothing."""
    compared = weights(pair)
    unsaved = frozenset(stored(pair.a) | stored(pair.b))
    found = [
        *_of_classes(pair),
        *_of_attributes(pair),
        *_of_tensors(pair, compared),
        *_of_modes(pair),
        *_of_adapters(pair),
        *_of_attention(pair),
        *_of_configs(pair),
        *_of_patches(pair),
    ]
    return Facts(tuple(found), compared, unsaved)


def _of_tensors(pair: Pair, compared: tuple[Weight, ...]) -> Iterator[Fact]:
    dtypes = tuple(dtype_name(main_dtype(s.root)) for s in (pair.a, pair.b))
    if dtypes[0] != dtypes[1]:
        yield Fact("dtype", "", "weights", dtypes[0], dtypes[1])
    for w in compared:
        kind: Kind = "buffer" if w.buffer else "weight"
        if w.state == "differs" or (w.state == "rounded" and (w.buffer or dtypes[0] == dtypes[1])):
            yield Fact(kind, w.path, w.name, w.a, w.b, w.distance)
        elif w.state not in ("equal", "rounded", "away"):
            yield Fact(kind, w.path, w.name, w.a or "not there", w.b or "not there")
    a, b = ties(pair.a), ties(pair.b)
    for name in dict.fromkeys([*a, *b]):
        if a.get(name) != b.get(name):
            one, other = (f"is {t[name]}" if name in t else "a tensor of its own" for t in (a, b))
            yield Fact("tie", name.rpartition(".")[0], name.rpartition(".")[2], one, other)


def _in_both(pair: Pair) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield the modules that both models have by one path, but for those that they share."""
    theirs = pair.b.modules()
    for path, a in pair.a.modules().items():
        b = theirs.get(path)
        if b is not None and a is not b:
            yield path, a, b


def _of_attributes(pair: Pair) -> Iterator[Fact]:
    for path, a, b in _in_both(pair):
        one, other = _values(a), _values(b)
        for name in dict.fromkeys([*one, *other]):
            values = one.get(name, _MISSING), other.get(name, _MISSING)
            if _alike(*values):
                continue
            if DROPS.search(name) and isinstance(values[0], (int, float)) and isinstance(values[1], (int, float)):
                yield Fact("attribute", path, name, str(values[0]), str(values[1]), values=values)
            else:
                kind: Kind = "eps" if name in EPS_NAMES else "attribute"
                yield Fact(kind, path, name, _word(values[0]), _word(values[1]), values=values)


_MISSING = "not there"


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, functools.partial) and isinstance(b, functools.partial):
        return (a.func, a.args, a.keywords) == (b.func, b.args, b.keywords)
    return type(a) is type(b) and a == b


def _values(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module, and the names of functions that it keeps."""
    out: dict[str, Any] = {}
    for name, value in module.__dict__.items():
        if name in LEFT_OUT or name.startswith("_"):
            continue
        plain = isinstance(value, PLAIN) or (
            isinstance(value, (tuple, list)) and all(isinstance(v, PLAIN) for v in value)  # pyright: ignore[reportUnknownVariableType]
        )
        if plain or (isinstance(value, (FunctionType, functools.partial)) and name != "forward"):
            out[name] = value
    return out


def _of_classes(pair: Pair) -> Iterator[Fact]:
    mine, theirs = pair.a.modules(), pair.b.modules()
    for path, a, b in _in_both(pair):
        own = tuple(_own_functions(m) for m in (a, b))
        for name in dict.fromkeys([*own[0], *own[1]]):
            bodies = [o.get(name) for o in own]
            if len({None if f is None else digest(f) for f in bodies}) > 1:
                one, other = ("the class's own" if f is None else f"set here ({f.__qualname__})" for f in bodies)
                yield Fact("class", path, name, one, other, values=(bodies[0], bodies[1]))
        if type(a) is not type(b) and (names := _other_bodies(type(a), type(b))):
            classes = type(a), type(b)
            yield Fact("class", path, ", ".join(names[:3]), classes[0].__name__, classes[1].__name__, values=classes)
    for side, paths in ((pair.a, [p for p in mine if p not in theirs]), (pair.b, [p for p in theirs if p not in mine])):
        outer = [p for p in paths if p.rpartition(".")[0] not in paths]
        yield from (
            Fact("parts", p, "", *(("there", "not there") if side is pair.a else ("not there", "there")))
            for p in outer
            if not _of_adapter(side, p)
        )


def _of_adapter(side: Side, path: str) -> bool:
    """True if a module is a part of PEFT's layer around a layer of the model."""
    holder = path.rpartition(".")[0]
    return any(common(p) == holder and hasattr(type(m), "adapter_layer_names") for p, m in side.survey.modules.items())


def _own_functions(module: nn.Module) -> dict[str, Any]:
    """Return the methods that are set on one module alone; not those of accelerate."""
    if accelerate.HOOK in module.__dict__:
        return {}
    found = {n: v for n, v in module.__dict__.items() if isinstance(v, MethodType) or n == "forward"}
    return {
        n: getattr(v, "__func__", v) for n, v in found.items() if isinstance(getattr(v, "__func__", v), FunctionType)
    }


@functools.cache
def _other_bodies(a: type, b: type) -> tuple[str, ...]:
    """Return the names of the methods whose bodies differ between two classes."""
    one, other = _methods(a), _methods(b)
    return tuple(n for n in dict.fromkeys([*one, *other]) if n not in one or n not in other or one[n] != other[n])


@functools.cache
def _methods(cls: type) -> Mapping[str, str]:
    out: dict[str, str] = {}
    for base in cls.__mro__:
        if base in (nn.Module, object) or base.__module__.startswith("torch.nn.modules.module"):
            break
        for name, value in vars(base).items():
            if isinstance(value, FunctionType) and name not in out and name not in ("__init__", "extra_repr"):
                out[name] = digest(inspect.unwrap(value))
    return out


def _of_modes(pair: Pair) -> Iterator[Fact]:
    mine, theirs = pair.a.modules(), pair.b.modules()
    differ = [p for p, a in mine.items() if p in theirs and a.training != theirs[p].training]
    words = {True: "training", False: "evaluation"}
    for path in differ:
        if not path or path.rpartition(".")[0] not in differ:
            modes = mine[path].training, theirs[path].training
            yield Fact("mode", path, "", words[modes[0]], words[modes[1]], values=modes)
        for name, value in _values(mine[path]).items():
            if DROPS.search(name) and isinstance(value, float) and value > 0:
                rates = (value if mine[path].training else 0.0), (value if theirs[path].training else 0.0)
                one, other = (f"{r:g}" if r else "off" for r in rates)
                yield Fact("dropout", path, name, one, other)


def _of_adapters(pair: Pair) -> Iterator[Fact]:
    one, other = _adapters(pair.a), _adapters(pair.b)
    for path in dict.fromkeys([*one, *other]):
        if one.get(path, "none") != other.get(path, "none"):
            yield Fact("adapter", path, "", one.get(path, "none"), other.get(path, "none"))


def _adapters(side: Side) -> dict[str, str]:
    out: dict[str, str] = {}
    for path, module in side.survey.modules.items():
        if not hasattr(type(module), "adapter_layer_names"):
            continue
        layer: Any = module
        names = ", ".join(map(str, layer.active_adapters)) or "none active"
        merged = f", merged: {', '.join(layer.merged_adapters)}" if layer.merged_adapters else ""
        out[common(path)] = f"{names} (off)" if peft.is_off(layer) else f"{names}{merged}"
    return out


def _of_attention(pair: Pair) -> Iterator[Fact]:
    theirs = pair.b.modules()
    for path, a in pair.a.modules().items():
        b = theirs.get(path)
        if b is None or eager_function(type(a)) is None:
            continue
        names = tuple(str(chosen(getattr(m, "config", None))) for m in (a, b))
        if names[0] != names[1]:
            yield Fact("attention", path, "", names[0], names[1])


def _of_configs(pair: Pair) -> Iterator[Fact]:
    theirs = {common(s.path): s.model for s in pair.b.survey.submodels}
    for submodel in pair.a.survey.submodels:
        path = common(submodel.path)
        if path not in theirs:
            continue
        one, other = (_flat(m.config.to_dict()) for m in (submodel.model, theirs[path]))
        for key in dict.fromkeys([*one, *other]):
            values = one.get(key, _MISSING), other.get(key, _MISSING)
            last = key.rpartition(".")[2]
            if values[0] != values[1] and last not in UNSAID and not last.startswith("_"):
                yield Fact("config", path, key, _word(values[0]), _word(values[1]), values=values)


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            out |= _flat(value, f"{name}.")  # pyright: ignore[reportUnknownArgumentType]
        else:
            out[name] = value
    return out


def _of_patches(pair: Pair) -> Iterator[Fact]:
    one, other = (_patched(s) for s in (pair.a, pair.b))
    for path, patch in dict.fromkeys([*one, *other]):
        counts = tuple(n.get((path, patch), 0) for n in (one, other))
        if counts[0] != counts[1]:
            a, b = (f"{n} edit{'s' * (n != 1)}" if n else "not applied" for n in counts)
            yield Fact("patch", path, patch, a, b)


def _patched(side: Side) -> dict[tuple[str, str], int]:
    out: dict[tuple[str, str], int] = {}
    for path, module, record in logged(side.root):
        if state_of(side.root, module, record).in_force:
            key = (common(path), record.patch)
            out[key] = out.get(key, 0) + 1
    return out


def _word(value: Any) -> str:
    if isinstance(value, FunctionType):
        return value.__qualname__
    if isinstance(value, functools.partial):
        return f"partial of {getattr(value.func, '__qualname__', 'a function')}"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def with_effect(fact: Fact, effect: str, *, tried: bool = False) -> Fact:
    """Return a fact with what the run showed of it."""
    return replace(fact, effect=effect, tried=tried or fact.tried)
