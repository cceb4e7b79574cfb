"""Tiny random models to test patches on: transformers' own classes from shrunk configs, and composites around them."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import takewhile
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

from hfpatch.atlas.atlas import MAPPINGS, architectures
from hfpatch.compat import initial
from hfpatch.errors import InputError
from hfpatch.given import NUMBER, SIZE, TEXT, WHOLE, Kind, optional, want
from hfpatch.lab.composites_lora import (
    EncodedLLM,
    peft_all,
    peft_all_linear,
    peft_qv,
    peft_towers,
    torch_encoder,
    torch_encoder_time_first,
)
from hfpatch.lab.composites_modulation import gated, modulated, trained_modulated
from hfpatch.lab.shrink import shrunk
from hfpatch.model.limits import numbers
from hfpatch.model.source import REJECTIONS
from hfpatch.model.walk import peek

TASKS: dict[str, Mapping[str, str]] = {
    task: getattr(modeling_auto, MAPPINGS[task]) for task in ("multimodal", "seq2seq", "causal")
}
"""Task -> architecture -> class name in transformers, the most general task first."""

_TIMM = "its image tower is built by timm, which needs the torchvision made for this torch"
NOT_TINY: dict[str, str] = {
    "fast_vlm": _TIMM,
    "gemma3n": f"{_TIMM}; its text model is the architecture gemma3n_text",
    "perception_lm": _TIMM,
}
"""Architectures for which no tiny model can be built, with the reason."""


MOST = 2**24
"""Largest number of weights of a tiny model: most have a hundredth of it."""
LARGEST = 2**20
"""Largest number in the config of a tiny model: a run of it may pad its batch, or fill a table, to such a length."""
WIDE = 256
"""A config without a whole number above this describes few weights; they are not counted."""


def tiny_config(architecture: str, **overrides: Any) -> Any:
    """Return a tiny config: in most architectures a vocabulary of 64, width 32, four text layers, two in each tower.

    Args:
        architecture: `config.model_type`.
        overrides: Config values, which may be those of a config that somebody else wrote; of the text part if the
            config has several parts.

    Raises:
        InputError: transformers has no such architecture, or an override is a number that makes no tiny model.
    """
    for name, _, value in numbers(overrides):
        if isinstance(value, int) and abs(value) > LARGEST and "theta" not in name:
            raise InputError(
                f"architecture {architecture!r}: a model with {name}={value:,} is not tiny; want at most {LARGEST:,}"
            )
    if architecture not in CONFIG_MAPPING:
        raise InputError(
            f"architecture {architecture!r}: transformers {transformers.__version__} has no such model_type"
        )
    cls: Any = CONFIG_MAPPING[architecture]
    return cls(**shrunk(cls, **overrides))


def tiny_model(architecture: str, *, task: str | None = None, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return a tiny model in evaluation mode, float32, with eager attention (sdpa on a CPU hides NaN).

    If transformers builds a language model only inside another (`qwen2_vl_text`), the result is the outer model. It
    has between ten thousand and a million parameters. `example_inputs` makes a training batch for it.

    Args:
        architecture: `config.model_type`.
        task: multimodal | seq2seq | causal; by default the first that the architecture has.
        seed: Seed of the weights; the global random state is restored.
        overrides: Config values; of the text part if the config has several parts.

    Raises:
        InputError: transformers has no such architecture, has no model of it for this task, rejects the overrides, or
            cannot build it here (`NOT_TINY`).
    """
    want("tiny_model", architecture=(architecture, TEXT), task=(task, optional(TEXT)), seed=(seed, WHOLE))
    architecture = home(architecture)
    with _refusals(architecture, overrides):
        return _tiny(architecture, task, seed, overrides)


def _tiny(architecture: str, task: str | None, seed: int, overrides: Mapping[str, Any]) -> PreTrainedModel:
    config = tiny_config(architecture, **overrides)
    tasks = [name for name, known in TASKS.items() if architecture in known]
    if task is not None and task not in tasks:
        raise InputError(
            f"tiny_model({architecture!r}, task={task!r}): transformers has it for {', '.join(tasks) or 'no such task'}"
        )
    if not tasks:
        raise InputError(
            f"tiny_model({architecture!r}): transformers has no language model of it for any of {', '.join(TASKS)}"
        )
    if reason := NOT_TINY.get(architecture):
        raise InputError(f"tiny_model({architecture!r}): {reason}")
    return tiny_of_class(getattr(transformers, TASKS[task or tasks[0]][architecture]), config, seed)


def tiny_of_class(cls: Any, config: Any, seed: int = 0) -> PreTrainedModel:
    """Return a tiny model of a class, as `tiny_model` does.

    Args:
        cls: The class, of transformers or another.
        config: Its config, or one that holds it: `tiny_config`.
        seed: Seed of the weights.

    Raises:
        InputError: It would have more weights than a tiny model.
    """
    config = _of_class(cls, config)
    if any(isinstance(value, int) and value > WIDE for _, _, value in numbers(config)):
        count = sum(p.numel() for p in initial.without_weights(cls, config, torch.float32).parameters())
        if count > MOST:
            raise InputError(f"{cls.__name__}: its config describes {count:,} weights, more than a tiny model has")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return initial.built(cls, config, torch.float32, "eager").eval()


@contextmanager
def _refusals(architecture: str, overrides: Mapping[str, Any]) -> Generator[None]:
    """Turn errors that transformers raises for the caller's overrides into one sentence."""
    try:
        yield
    except REJECTIONS as error:
        if isinstance(error, InputError) or not overrides:
            raise
        what = " ".join(str(error).split())
        raise InputError(
            f"tiny_model({architecture!r}): transformers rejects {', '.join(overrides)}: {what}"
        ) from error


@cache
def home(architecture: str) -> str:
    """Return the architecture to build: itself, or one whose config contains it.

    Of several, the one with the longest common prefix in the name.
    """
    known = architectures()
    if architecture in known or architecture not in CONFIG_MAPPING:
        return architecture

    def alike(name: str) -> int:
        return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(name, architecture, strict=False))))

    likeliest = sorted(known, key=alike, reverse=True)  # a config is imported when it is looked at
    holders = (n for n in likeliest if n in CONFIG_MAPPING and architecture in _parts(CONFIG_MAPPING[n]))
    return next(holders, architecture)


def _parts(config: Any) -> set[str | None]:
    """Return the architectures of all sub-configs of a config, at any depth."""
    parts: list[Any] = list(getattr(config, "sub_configs", {}).values())
    return {getattr(part, "model_type", None) for part in parts}.union(*map(_parts, parts))


def _of_class(cls: Any, config: Any) -> Any:
    """Return the config, or the sub-config that a model class takes."""
    if isinstance(config, cls.config_class):
        return config
    parts = (getattr(config, name) for name in type(config).sub_configs)
    return next((part for part in parts if isinstance(part, cls.config_class)), config)


def rescale(model: nn.Module, scale: Mapping[str, float], fill: Mapping[str, float]) -> None:
    """Multiply, or fill, the parameters whose paths match the globs, in place.

    Raises:
        InputError: No parameter matches a glob.
    """
    names = dict(model.named_parameters())
    with torch.no_grad():
        for pattern, change in [
            *((p, ("mul_", v)) for p, v in scale.items()),
            *((p, ("fill_", v)) for p, v in fill.items()),
        ]:
            hits = fnmatch.filter(names, pattern)
            if not hits:
                raise InputError(f"no parameter of {type(model).__name__} matches {pattern!r}; correct the glob")
            for name in hits:
                getattr(names[name], change[0])(change[1])


LLM = Kind("a language model", lambda v: isinstance(v, nn.Module) and peek(v, "config") is not None)


class SpeechLLM(nn.Module):
    """Features -> LayerNorm -> projector -> language model, as in hand-written speech LLMs.

    Args:
        llm: The language model.
        width: Features per frame.
        eps: eps of the LayerNorm.
    """

    def __init__(self, llm: PreTrainedModel, width: int = 24, eps: float = 1e-4) -> None:
        super().__init__()
        want("SpeechLLM", llm=(llm, LLM), width=(width, SIZE), eps=(eps, NUMBER))
        self.ln_speech = nn.LayerNorm(width, eps=eps)
        self.speech_proj = nn.Linear(width, int(llm.config.get_text_config().hidden_size))
        self.llm = llm

    def forward(self, input_ids: torch.Tensor, features: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Run with `features [batch, frames, width]` before the text `input_ids [batch, tokens]`."""
        from hfpatch.model.embed import embed_tokens

        embeds = embed_tokens(self.llm)(input_ids)
        if features is not None:
            speech = self.speech_proj(self.ln_speech(features.to(self.ln_speech.weight.dtype)))
            embeds = torch.cat([speech.to(embeds.dtype), embeds], dim=1)
        return self.llm(inputs_embeds=embeds, **kwargs)


def trained_speech_llm(llm: PreTrainedModel) -> SpeechLLM:
    """Return a `SpeechLLM` whose LayerNorm and projector no longer have their initial weights."""
    model = SpeechLLM(llm)
    with torch.no_grad():
        model.ln_speech.weight.mul_(1.25)
        model.speech_proj.weight.mul_(1.25)
    return model


COMPOSITES: dict[str, Callable[[Any], nn.Module]] = {
    "speech-llm": SpeechLLM,
    "trained-speech-llm": trained_speech_llm,
    "lora-qv": peft_qv,
    "lora-all": peft_all,
    "lora-all-linear": peft_all_linear,
    "lora-towers": peft_towers,
    "torch-encoder": torch_encoder,
    "torch-encoder-plain": EncodedLLM,
    "torch-encoder-time-first": torch_encoder_time_first,
    "modulated": modulated,
    "trained-modulated": trained_modulated,
    "gated": gated,
}
"""Values of `Case.inside` -> functions that build the composite."""
