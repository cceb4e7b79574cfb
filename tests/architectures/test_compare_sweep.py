"""No difference between a model and its copy, for every architecture that a tiny model can be made of."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import transformers

import hfpatch
from hfpatch.errors import InputError
from hfpatch.lab.tiny import TASKS
from hfpatch.model.source import REJECTIONS
from hfpatch.testing import example_inputs, tiny_model

pytestmark = pytest.mark.architectures

EVERY = [(task, name) for task, known in TASKS.items() for name in sorted(known)]
SHARDS = 16
LEAST = 300
"""Of the 350 models, those that must have been compared."""


def difference(task: str, architecture: str) -> str | None:
    """What differs between a model and its copy; `not compared` if there is no such model."""
    try:
        model = tiny_model(architecture, task=task)
        batch = example_inputs(model)
        with torch.no_grad():
            model(**batch)
    except (InputError, *REJECTIONS):
        return "not compared"
    found = hfpatch.compare(model, copy.deepcopy(model), batch)
    if found.facts:
        return f"{found.facts[0].kind} {found.facts[0].place}: {found.facts[0].a}, {found.facts[0].b}"
    return None if found.equal else found.sentence


@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_copy_is_equal(shard: int) -> None:
    transformers.logging.set_verbosity(50)
    mine = EVERY[shard::SHARDS]
    wrong: dict[tuple[str, str], str] = {}
    compared = 0
    for task, architecture in mine:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            said = difference(task, architecture)
        compared += said != "not compared"
        if said not in (None, "not compared"):
            wrong[task, architecture] = said
    assert not wrong
    assert compared >= LEAST * len(mine) // len(EVERY) - 3, "fewer tiny models than there were"
