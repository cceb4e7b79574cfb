"""Tiny models around towers: vision and audio models, and query formers, inside a model that holds one, or alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

from hfpatch.atlas.atlas import architectures
from hfpatch.compat import hooks
from hfpatch.errors import HfpatchError, InputError
from hfpatch.lab.example import example_inputs
from hfpatch.lab.example_text import text
from hfpatch.lab.shrink import shrunk
from hfpatch.lab.tiny import NOT_TINY, TASKS, tiny_config, tiny_of_class
from hfpatch.model.embed import find_embedding
from hfpatch.model.source import REJECTIONS
from hfpatch.model.walk import Walk

DEPTHS = ("num_hidden_layers", "depth", "encoder_layers", "num_layers", "num_encoder_layers", "n_layers")
"""Config keys for the number of layers of a tower."""

ENCODERS = frozenset(
    name
    for names in (
        modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
    )
    for name in names
    if name in modeling_auto.MODEL_MAPPING_NAMES
)
"""Encoders of images and sounds that a hand-written model may hold."""

NORMAL = 0.02
"""Usual standard deviation of a new model's weights."""

FAILED = (HfpatchError, *REJECTIONS, StopIteration)
"""What building or running a tiny model around a tower may raise."""


class WithHead(nn.Module):
    """A tower alone, with a linear layer that reads its `last_hidden_state` into `logits`."""

    def __init__(self, tower: PreTrainedModel, width: int) -> None:
        super().__init__()
        self.tower = tower
        self.head = nn.Linear(width, 32, dtype=torch.float32)

    def forward(self, **inputs: Any) -> SimpleNamespace:
        """Run the tower, and the head on what it returns."""
        return SimpleNamespace(logits=self.head(self.tower(**inputs).last_hidden_state))


def tower_model(architecture: str, layers: int | None = None, **overrides: Any) -> nn.Module:
    """Return a tiny model that runs a tower on the batch of `tower_inputs`: one that holds it, or the tower and a head.

    Args:
        architecture: `config.model_type` of the tower.
        layers: Number of its layers, if it takes another than its own.
        overrides: Config values of the tower.

    Raises:
        InputError: No such model can be built here.
    """
    return copy.deepcopy(_found(architecture, layers, json.dumps(overrides, sort_keys=True)))


@lru_cache(maxsize=4)
def _found(architecture: str, layers: int | None, overrides: str) -> nn.Module:
    """Return the first model that runs; kept, because a proof needs copies of it."""
    why = f"transformers has no model that holds {architecture!r} and runs it"
    for name in (*holders(architecture), ""):
        for depth in dict.fromkeys((layers, None)):
            try:
                return _built(name, architecture, depth, json.loads(overrides))
            except FAILED as error:
                why = (str(error).splitlines() or [type(error).__name__])[0]
    raise InputError(f"tower_model({architecture!r}): {why}")


def tower_inputs(model: nn.Module) -> dict[str, Any]:
    """Return a batch for a model of `tower_model`."""
    if isinstance(model, WithHead):
        return {k: plain(k, v) for k, v in example_inputs(model.tower).items() if k not in text()}
    return example_inputs(model)


def reads(cls: type[PreTrainedModel]) -> str:
    """Return what a class reads, as `shrunk` takes it: text | vision | audio."""
    return {"pixel_values": "vision", "input_ids": "text"}.get(cls.main_input_name, "audio")


def plain(name: str, value: Any) -> Any:
    """Return an input as a tower alone reads it: samples as [batch, samples]."""
    return value[:, 0] if name == "input_values" and value.dim() == 3 else value


@cache
def is_tower(architecture: str) -> bool:
    """True if a model of this architecture reads no tokens, so it can only be tried as a tower."""
    if architecture in architectures() or architecture not in CONFIG_MAPPING:
        return False
    try:
        model = tower_model(architecture)
    except FAILED:
        return False
    return not any(find_embedding(s.model) for s in Walk(model).submodels if s.architecture == architecture)


def towers() -> frozenset[str]:
    """Return the architectures inside transformers' language models, and its encoders of images and sounds."""
    inside = frozenset[str]().union(*map(_parts_of, _language_models()))
    return frozenset(name for name in (*inside, *ENCODERS) if name in CONFIG_MAPPING)


def holders(architecture: str) -> Iterator[str]:
    """Yield the language models of transformers that are or hold an architecture, those with a similar name first."""

    def alike(name: str) -> int:
        return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(name, architecture, strict=False))))

    names = sorted(_language_models(), key=alike, reverse=True)
    return (name for name in names if architecture in _parts_of(name))


def _language_models() -> list[str]:
    return list(dict.fromkeys(name for known in TASKS.values() for name in known if name not in NOT_TINY))


@cache
def _parts_of(name: str) -> frozenset[str]:
    """Return the architectures inside the tiny config of a language model."""
    before = transformers.logging.get_verbosity()
    try:
        transformers.logging.set_verbosity_error()  # it warns about sizes
        return frozenset(part.model_type for part in _parts(tiny_config(name)))
    except FAILED:
        return frozenset()
    finally:
        transformers.logging.set_verbosity(before)


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            yield from _parts(part)


def _built(holder: str, architecture: str, depth: int | None, overrides: dict[str, Any]) -> nn.Module:
    """Return the model, if it runs on its batch and its tower runs then."""
    inside = bool(holder)
    model = holding(holder, architecture, depth, **overrides) if inside else _alone(architecture, depth, overrides)
    towers = [s.model for s in Walk(model).submodels if s.architecture == architecture]
    ran: list[bool] = []

    def note(*_: object) -> None:
        ran.append(True)

    handles = [hooks.after(m, note) for t in towers for m in t.modules()]
    try:
        with torch.no_grad():
            model(**tower_inputs(model))
    finally:
        for handle in handles:
            handle.remove()
    if not ran:
        raise InputError(f"{holder} does not run its {architecture} on an example batch")
    return model


def holding(holder: str, tower: str, layers: int | None = None, **overrides: Any) -> PreTrainedModel:
    """Return a tiny language model whose tower of this architecture has so many layers and these config values.

    Args:
        holder: `config.model_type` of the language model.
        tower: That of the tower.
        layers: Number of its layers; None for that of `tiny_model`.
        overrides: Config values of the tower.
    """
    config = tiny_config(holder)
    for part in _parts(config):
        if part.model_type == tower:
            _set(part, layers, overrides)
    task = next(task for task, known in TASKS.items() if holder in known)
    return tiny_of_class(getattr(transformers, TASKS[task][holder]), config)


def _alone(architecture: str, depth: int | None, overrides: dict[str, Any]) -> nn.Module:
    name: Any = modeling_auto.MODEL_MAPPING_NAMES.get(architecture)
    if name is None:
        raise InputError(f"transformers has no model that holds {architecture!r} or is one")
    cls: Any = getattr(transformers, name if isinstance(name, str) else name[0])
    if (kind := reads(cls)) == "text":
        raise InputError(f"{cls.__name__} reads tokens")
    config: Any = CONFIG_MAPPING[architecture]
    small = config(**shrunk(config, kind))
    _set(small, depth, overrides)
    tower = tiny_of_class(cls, small)
    alone = WithHead(tower, 1)
    with torch.no_grad():
        width = tower(**tower_inputs(alone)).last_hidden_state.shape[-1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        alone.head = nn.Linear(int(width), 32, dtype=torch.float32)
    return alone.eval()


def _set(config: Any, depth: int | None, overrides: dict[str, Any]) -> None:
    for name, value in overrides.items():
        setattr(config, name, value)
    if 0 < getattr(config, "initializer_range", 1.0) < NORMAL / 10:
        config.initializer_range = NORMAL  # SAM's default leaves a tower that returns 0
    name = next((n for n in DEPTHS if isinstance(getattr(config, n, None), int)), None)
    if depth is not None:
        if name is None:
            raise InputError(f"{config.model_type} has no number of layers of its own")
        setattr(config, name, depth)
