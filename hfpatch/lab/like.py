"""A tiny model like another one, with a batch that it runs on."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfpatch.errors import InputError
from hfpatch.lab.example import example_inputs
from hfpatch.lab.example_text import text
from hfpatch.lab.shrink import shrunk, shrunk_like
from hfpatch.lab.tiny import tiny_of_class
from hfpatch.lab.towers import plain, reads
from hfpatch.model.embed import find_embedding
from hfpatch.model.evaluating.full_float32 import full_float32
from hfpatch.model.source import REJECTIONS
from hfpatch.model.walk import stock_class

FAILED = (*REJECTIONS, NotImplementedError, StopIteration)
"""What building or running a tiny model of any class may raise."""


@dataclass(frozen=True)
class Like:
    """A class of transformers and a config of it, as values: what a run of a tiny model like a model depends on.

    Attributes:
        cls: The class.
        kind: The class of the config.
        config: The config, as JSON.
    """

    cls: type[PreTrainedModel]
    kind: type[Any]
    config: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> Like:
        """Return that of a model, with the nearest of its classes that transformers defines."""
        return cls(stock_class(model) or type(model), type(model.config), model.config.to_json_string())

    def tiny(self) -> tuple[PreTrainedModel, dict[str, Any]]:
        """Return a tiny model and a batch for it.

        Its config is this one, made small; where that does not run, the tiny config of the architecture.

        Raises:
            InputError: Neither runs.
        """
        whys: list[str] = []
        # sizes for text are the last resort: they leave those of images and sounds as they are
        for make, kind in product((self._shrunk, self._of_the_architecture), dict.fromkeys((reads(self.cls), "text"))):
            try:
                model = tiny_of_class(self.cls, make(kind))
                batch = _batch(model)
                outputs(model, batch)
            except FAILED as error:
                whys.append(short(error))
                continue
            return model, batch
        raise InputError(f"no tiny {self.cls.__name__} can be run: {whys[-1]}")

    def _shrunk(self, kind: str) -> Any:
        return shrunk_like(self.kind.from_dict(json.loads(self.config)), kind)

    def _of_the_architecture(self, kind: str) -> Any:
        return self.kind(**shrunk(self.kind, kind))


def _batch(tiny: PreTrainedModel) -> dict[str, Any]:
    batch = example_inputs(tiny)
    if find_embedding(tiny) is not None:
        return batch
    return {key: plain(key, value) for key, value in batch.items() if key not in text()}


def outputs(model: nn.Module, batch: dict[str, Any]) -> list[torch.Tensor]:
    """Run a tiny model in training mode, with dropout off and the same random numbers; return its tensors of floats."""
    model.train()
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout1d, nn.Dropout2d)):
            module.p = 0.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return list(_floats(model(**batch)))


def _floats(output: Any) -> Iterator[torch.Tensor]:
    values: Any = output.values() if hasattr(output, "values") else output if isinstance(output, tuple) else (output,)
    yield from (v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point())


@contextlib.contextmanager
def apart() -> Generator[None]:
    """Run tiny models independently of the caller's contexts: with gradients, on the CPU, silently."""
    cpu = torch.device("cpu")
    elsewhere = torch.get_default_device() != cpu  # under this context each operation calls a function of Python
    with (
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        cpu if elsewhere else contextlib.nullcontext(),
        torch.autocast("cpu", enabled=False),
        full_float32(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # torch's, that no input of a checkpoint requires a gradient
        yield


@contextlib.contextmanager
def requiring(parameters: Iterable[nn.Parameter], *, on: bool) -> Generator[None]:
    """Have parameters require a gradient, or not, for a while."""
    before = {p: p.requires_grad for p in parameters}
    try:
        for parameter in before:
            parameter.requires_grad_(on)
        yield
    finally:
        for parameter, wanted in before.items():
            parameter.requires_grad_(wanted)


def short(error: Exception) -> str:
    """Return an error as a few words: its class, and the first sentence of its text."""
    said = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {said[0].partition('. ')[0].partition(' (')[0]}".rstrip(": .")


def input_embeddings(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the modules that `enable_input_require_grads` sets its hook on."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            try:
                found: Any = module.get_input_embeddings()
            except (NotImplementedError, AttributeError, TypeError):
                continue
            if isinstance(found, nn.Module):
                yield found
