"""The lists of layers in a model, what each perceives, and what mixes tokens in its layers: told from structure.

A layer holds a norm, matrices and, in at least one layer of its list, a mixer: attention, a state space, a
convolution. A list of nothing but norms and matrices is a projector's, and left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hfpatch.compat.modules import CONVOLUTIONS, children, parameters
from hfpatch.model.attention import eager_function
from hfpatch.model.embed import find_embedding
from hfpatch.model.norms import is_norm
from hfpatch.model.survey import Survey
from hfpatch.model.walk import dims, starred
from hfpatch.model.wrapping import ON_LAYERS, unwrap

TEXT, VISION, AUDIO, OTHER = "text", "vision", "audio", "other"

ATTENTION = "attention"
MAMBA = "mamba"
LINEAR_ATTENTION = "linear attention"
RWKV = "rwkv"
RECURRENT = "recurrent"
CONVOLUTION = "convolution"

INSIDE = ("adapter", *ON_LAYERS)
"""Wrappers that stand in the place of a layer or of a part of one."""

_STATES = frozenset(("A_log", "D", "time_decay"))
LISTS = (nn.ModuleList, nn.Sequential)
_INPUTS = (
    (re.compile(r"pixel|flattened_patches|image|video"), VISION),
    (re.compile(r"input_features|input_values|audio|spectrogram"), AUDIO),
)
_NAMES = (
    (re.compile(r"audio|speech|acoustic|codec|whisper|semantic_tokenizer|\basr|diari[sz]"), AUDIO),
    (re.compile(r"vision|visual|image|video|pixel|\bvit|siglip|clip|\bsam\b|sam_"), VISION),
)


@dataclass(frozen=True)
class LayerKind:
    """Layers of one list that are alike: their class, what mixes tokens in them, and which they are.

    `mixers` are kinds with classes: attention, mamba, linear attention, rwkv, recurrent, convolution. Empty for a
    layer that is a feed-forward part alone.
    """

    cls: str
    mixers: tuple[tuple[str, str], ...]
    layers: tuple[int, ...]

    @property
    def kinds(self) -> str:
        """What mixes tokens, in one phrase: `attention + mamba`."""
        return " + ".join(dict.fromkeys(kind for kind, _ in self.mixers)) or "feed-forward"

    def to_dict(self) -> dict[str, Any]:
        """As JSON: class, mixers [{kind, class}], layers (indices in the list)."""
        mixers = [{"kind": kind, "class": cls} for kind, cls in self.mixers]
        return {"class": self.cls, "mixers": mixers, "layers": list(self.layers)}


@dataclass(frozen=True)
class LayerList:
    """One list of layers.

    `path` has the indices of outer lists (the stages of a pyramid) replaced by `*`; `layers` counts all of them.
    `modality` is what the layers perceive: text, vision, audio, or other (a query former, an action expert).
    """

    path: str
    submodel: str
    modality: str
    layers: int
    kinds: tuple[LayerKind, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON: path, submodel, modality, layers, kinds."""
        return {**vars(self), "kinds": [k.to_dict() for k in self.kinds]}


Items = list[tuple[str, nn.Module]]


@dataclass(frozen=True)
class _Held:
    """What lies in a module and below it: a norm, how many matrices, which parameters that only a recurrence has."""

    norm: bool
    matrices: int
    states: frozenset[str]


class _Layers:
    """One reading of an object: what each module holds, asked bottom up once."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.held: dict[int, _Held] = {}
        self._sum(survey.root)

    def _sum(self, root: nn.Module) -> None:
        """Without recursion: a model may be deeper than Python's stack, and hold itself."""
        pending, opened = [root], set[int]()
        while pending:
            module = pending[-1]
            if id(module) in opened:
                pending.pop()
                if id(module) not in self.held:  # one module may have several places
                    self.held[id(module)] = self._own_and_below(module)
                continue
            opened.add(id(module))
            pending.extend(c for c in children(module).values() if c is not None and id(c) not in opened)

    def _own_and_below(self, module: nn.Module) -> _Held:
        own = parameters(module)
        below = [self.held[id(c)] for c in children(module).values() if c is not None and id(c) in self.held]
        return _Held(
            norm=any(h.norm for h in below) or is_norm(module) or "Norm" in type(module).__name__,
            matrices=sum(h.matrices for h in below)
            + sum(p is not None and dims(p) > 1 and p.numel() > max(p.shape) for p in own.values()),
            states=_STATES.intersection(own).union(*(h.states for h in below if h.states)),
        )

    def lists(self) -> Iterator[tuple[str, Items]]:
        """Lists of layers, in module order."""
        mixing: list[tuple[str, Items]] = []
        bare: list[tuple[str, Items]] = []  # of norms and matrices alone
        taken = "\n"  # in no path
        for path, module in self.survey.modules.items():
            if path.startswith(taken) or not isinstance(module, LISTS) or len(module) == 0:
                continue
            items = [(f"{path}.{name}", item) for name, item in module.named_children()]
            if not all(self.held[id(item)].matrices for _, item in items):
                continue
            normed = [self.held[id(item)].norm for _, item in items]
            if not all(normed[:-1]) or not any(normed):  # the last may be the way out
                if self._spread(path, items):
                    mixing.append((path, items))
                continue
            if any(isinstance(item, LISTS) or self._is_stage(item) for _, item in items):
                continue  # the lists in it are met later in this walk
            taken = f"{path}."
            mixers = [self.mixers(item) for _, item in items]
            if any(mixers):
                branches = all(self.held[id(item)].matrices > 1 for _, item in items)
                if branches:  # one convolution and its norm make patches or frames
                    mixing.append((path, items))
            else:
                bare.append((path, items))
        homes = {self._home(path) for path, _ in mixing}
        longest: dict[str, tuple[str, Items]] = {}
        for path, items in bare:
            home = self._home(path)
            if home not in homes and len(items) > max(1, len(longest.get(home, ("", []))[1])):
                longest[home] = (path, items)
        order = {path: i for i, path in enumerate(self.survey.modules)}
        yield from sorted((*mixing, *longest.values()), key=lambda found: order[found[0]])

    def _home(self, path: str) -> str:
        around = self.survey.around(path)
        return "" if around is None else around[0]

    def _is_stage(self, item: nn.Module) -> bool:
        """Whether a list in an item has whole layers for items: the step of a pyramid."""
        return any(
            isinstance(m, LISTS)
            and len(m) > 0
            and all(self.held[id(i)].norm and self.held[id(i)].matrices > 1 and self._below(i) for i in m)
            for m in item.modules()
        )

    def _spread(self, path: str, items: Items) -> bool:
        """XLM keeps the parts of its layers in lists side by side: the list of mixers stands for all of them."""
        if len(items) < 2 or not all(self.kind(item) for _, item in items):
            return False
        parent = self.survey.modules[path.rpartition(".")[0]]
        if isinstance(parent, LISTS) or self.kind(parent):
            return False
        return any(
            isinstance(beside, nn.ModuleList) and len(beside) == len(items) and all(is_norm(m) for m in beside)
            for beside in parent.children()
        )

    def mixers(self, layer: nn.Module) -> tuple[tuple[str, str], ...]:
        """(kind, class) of the outermost modules in a layer that mix tokens; the layer's own, where it is one."""
        found = self._below(layer)
        if not found and (kind := self.kind(layer)) is not None:
            found = [(kind, type(unwrap(layer, INSIDE)).__name__)]
        return tuple(dict.fromkeys(found))

    def _below(self, layer: nn.Module, met: set[int] | None = None) -> list[tuple[str, str]]:
        met = set() if met is None else met  # a model may hold itself
        found: list[tuple[str, str]] = []
        for child in layer.children():
            if not self.held[id(child)].matrices or id(child) in met:
                continue
            met.add(id(child))
            kind = self.kind(child)
            if kind is None:
                found.extend(self._below(child, met))
            else:
                found.append((kind, type(unwrap(child, INSIDE)).__name__))
        return found

    def kind(self, module: nn.Module) -> str | None:
        """What kind of mixer a module is; None for one that is none, or merely holds one."""
        if isinstance(module, LISTS):
            return None
        if isinstance(module, CONVOLUTIONS):
            return CONVOLUTION if max(module.kernel_size) > 1 else None
        held = self.held[id(module)]
        if held.states:
            inner = (self.held[id(child)] for child in module.children())
            if any(h.states and h.matrices == held.matrices for h in inner) or held.matrices < 2:
                return None  # a frame around the mixer, or a gate in it
            return RWKV if "time_decay" in held.states else MAMBA if "D" in held.states else LINEAR_ATTENTION
        told = _kind_of(type(module))
        return told if held.matrices > (told != CONVOLUTION) else None


@cache
def _kind_of(cls: type[nn.Module]) -> str | None:
    """What kind of mixer a class is by its code and its name."""
    name = cls.__name__
    if name == "Conv1D":  # GPT-2's linear map
        return None
    if re.search(r"Recurrent(Block|Layer)$|LSTM(Layer|Cell)$", name):
        return RECURRENT
    if re.search(r"Lightning|Delta(Net|Attention|Rule)", name):
        return LINEAR_ATTENTION
    if eager_function(cls) is not None or issubclass(cls, nn.MultiheadAttention):
        return ATTENTION
    if re.search(r"Att(ention|n)(?!.*(Layer|Block)$)|MLA$|MoA$", name):
        return ATTENTION
    return CONVOLUTION if re.search(r"(?<!De)Conv(?!ert)", name) else None


def layer_lists(survey: Survey) -> tuple[LayerList, ...]:
    """Every list of layers in an object, in module order. Reads only."""
    reading = _Layers(survey)
    merged: dict[str, Items] = {}
    for path, items in reading.lists():
        merged.setdefault(starred(path), []).extend(items)
    out: list[LayerList] = []
    for path, items in merged.items():
        holder = survey.holder(items[0][0])
        kinds: dict[tuple[str, tuple[tuple[str, str], ...]], list[int]] = {}
        for i, (_, item) in enumerate(items):
            kinds.setdefault((type(unwrap(item, INSIDE)).__name__, reading.mixers(item)), []).append(i)
        made = tuple(LayerKind(cls, found, tuple(at)) for (cls, found), at in kinds.items())
        home = "" if holder is None else holder.path
        out.append(LayerList(path, home, modality(survey, *items[0]), len(items), made))
    return tuple(out)


def modality(survey: Survey, path: str, layer: nn.Module) -> str:
    """What a layer perceives, told by the innermost part around it that says so."""
    if told := re.search(r"(Audio|Vision)(?!.*Decoder)\w*(Layer|Block)$", type(unwrap(layer, INSIDE)).__name__):
        return told.group(1).lower()
    names = path.split(".")
    for depth in range(len(names), -1, -1):
        module = survey.modules[".".join(names[:depth])]
        if not isinstance(module, PreTrainedModel):
            if (told := _first(_NAMES, names[depth - 1].lower())) is not None and depth:
                return told
            continue
        if (told := _first(_INPUTS, str(getattr(module, "main_input_name", "")))) and not _composite(module):
            return told
        if find_embedding(module) is not None:
            return TEXT
        said = f"{names[depth - 1] if depth else ''} {getattr(module.config, 'model_type', '')}".lower()
        if (told := _first(_NAMES, said)) is not None and not _composite(module):
            return told
    return OTHER


def _composite(module: PreTrainedModel) -> bool:
    """Whether a model is several: what it takes first says nothing of its parts."""
    return find_embedding(module) is not None or any(
        isinstance(m, PreTrainedModel) and m is not module and m.config is not module.config for m in module.children()
    )


def _first(patterns: Iterable[tuple[re.Pattern[str], str]], text: str) -> str | None:
    return next((kind for pattern, kind in patterns if pattern.search(text)), None)
