"""`embed_tokens` of every architecture is the module that a run calls with the ids."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

import hfpatch
from hfpatch.errors import InputError, NoEmbeddingError
from hfpatch.lab.example import example_inputs
from hfpatch.lab.tiny import TASKS, tiny_model
from hfpatch.model.source import REJECTIONS

pytestmark = pytest.mark.architectures

EVERY = [(task, name) for task, known in TASKS.items() for name in sorted(known)]
SHARDS = 8
LEAST = 320
"""Of the 350 pairs, those that must have run."""


def called(model: PreTrainedModel, batch: dict[str, Any]) -> list[nn.Embedding]:
    """The tables that a run calls with the ids; of a decoder without ids beside it, with what its labels become."""
    ids = batch.get("input_ids", batch.get("decoder_input_ids"))
    found: list[nn.Embedding] = []

    def note(module: nn.Module, args: Any, kwargs: Any, _out: Any) -> None:
        given = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(given, torch.Tensor) and isinstance(module, nn.Embedding) and reads(given, ids):
            found.append(module)

    handles = [m.register_forward_hook(note, with_kwargs=True) for m in model.modules() if isinstance(m, nn.Embedding)]
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def reads(given: torch.Tensor, ids: Any) -> bool:
    """True if a tensor holds the ids, image tokens apart."""
    if not isinstance(ids, torch.Tensor) or given.numel() != ids.numel() or given.shape[0] != ids.shape[0]:
        return False
    return bool((given.reshape(-1).clamp(0) == ids.reshape(-1).clamp(0)).float().mean() > 0.6)


def stock(model: PreTrainedModel) -> Any:
    try:
        return model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None


def complaint(model: PreTrainedModel, batch: dict[str, Any]) -> str:
    """What is wrong with what `embed_tokens` returns; empty if nothing is."""
    truth, own = called(model, batch), stock(model)
    try:
        mine = hfpatch.embed_tokens(model)
    except NoEmbeddingError as error:
        held = set() if own is None else set(own.modules())
        several = isinstance(own, nn.ModuleList) and "codebooks" in str(error)
        return "" if several or not held & set(truth) else f"refused, and the stock getter is right: {error}"
    if not truth:  # it reads other than ids here
        return "" if own is None or mine is own or isinstance(mine, nn.Embedding) else f"{type(mine).__name__}"
    return "" if set(mine.modules()) & set(truth) else "not the module that is called"


@pytest.mark.parametrize("shard", range(SHARDS))
def test_the_module_that_is_called_with_the_ids(shard: int) -> None:
    transformers.logging.set_verbosity(50)
    wrong: list[str] = []
    ran = 0
    for task, architecture in EVERY[shard::SHARDS]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                model = tiny_model(architecture, task=task)
                said = complaint(model, example_inputs(model))
            except (InputError, *REJECTIONS):
                continue
        ran += 1
        wrong += [f"{task} {architecture}: {said}"] if said else []
    assert not wrong, "\n".join(wrong)
    assert ran >= LEAST // SHARDS - 2
