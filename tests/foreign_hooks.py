"""Loads a model that another process saved with its hooks, and works on it; started by test_foreign_hooks.py.

A line is printed for each way of working on it: which hooks are lost, and which are no longer called as they were.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

import hfpatch
from hfpatch.lab.overflow import overflow
from hfpatch.nn import ModulationAdapter

BATCH = {"input_ids": torch.arange(12).view(2, 6) + 3, "labels": torch.arange(12).view(2, 6) + 3}
KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


class Counts:
    """A hook of the user's, which counts its calls."""

    def __init__(self) -> None:
        self.called = 0

    def __call__(self, *_: Any) -> None:
        self.called += 1


def hook(model: nn.Module) -> None:
    """A user's hooks of each kind on every module."""
    for module in model.modules():
        module.register_forward_pre_hook(Counts())
        module.register_forward_hook(Counts())
        module.register_state_dict_post_hook(Counts())
    for layer in model.model.layers:
        layer.register_full_backward_hook(Counts())


def there(model: nn.Module) -> dict[tuple[str, str, int], Counts]:
    """The user's hooks, by where and under which number they are."""
    return {
        (path, table, key): found
        for path, module in model.named_modules()
        for table in KINDS
        for key, found in getattr(module, table).items()
        if isinstance(found, Counts)
    }


def calls(model: nn.Module) -> dict[tuple[str, str, int], int]:
    """How often each of them is called in one step."""
    for found in there(model).values():
        found.called = 0
    model(**BATCH).loss.backward()
    model.zero_grad()
    return {where: found.called for where, found in there(model).items()}


def verified(model: Any, _folder: Path) -> None:
    proof = hfpatch.verify(model, BATCH, runs=["as it is", "bfloat16 weights"])
    assert proof.reference.finite
    assert proof["bfloat16 weights"].kl > 0


def traced(model: Any, _folder: Path) -> None:
    with hfpatch.trace(model) as healthy:
        model(**BATCH).loss.backward()
    assert healthy.first_bad is None
    weight = model.model.layers[1].mlp.down_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = math.inf
    with hfpatch.trace(model) as ill:
        model(**BATCH).loss.backward()
    assert ill.first_bad is not None
    assert "layers.1" in str(ill.first_bad)
    with torch.no_grad():
        weight.copy_(kept)
    model.zero_grad()


def guarded(model: Any, folder: Path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = hfpatch.Guard(model, optimizer, black_box=hfpatch.BlackBox(folder / "box"), verbose=False)
    guard.step(model(**BATCH).loss)
    outcome = guard.step(model(**BATCH).loss * math.nan)
    assert outcome.skipped
    assert list((folder / "box").iterdir())


def checked(model: Any, _folder: Path) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".layers." in name)
    model._set_gradient_checkpointing(True, functools.partial(checkpoint, use_reentrant=True))
    embeds = torch.zeros(2, 6, model.config.hidden_size)
    found = hfpatch.check(model, batch={"inputs_embeds": embeds, "labels": BATCH["labels"]})
    assert "checkpointing" in str(found)
    model.gradient_checkpointing_disable()
    model.requires_grad_(True)


def modulated(model: Any, _folder: Path) -> None:
    ModulationAdapter.attach(model, 2)
    torch.nn.Linear(1, 1).register_forward_hook(Counts())  # takes a number that attaching must not have needed


def overflown(model: Any, _folder: Path) -> None:
    kept = [p.detach().clone() for p in model.parameters()]
    overflow(model, {"input_ids": BATCH["input_ids"]})
    with torch.no_grad():
        for parameter, was in zip(model.parameters(), kept, strict=True):
            parameter.copy_(was)


WAYS: dict[str, Callable[[Any, Path], None]] = {
    "trace": traced,
    "verify": verified,
    "guard": guarded,
    "check": checked,
    "modulation": modulated,
    "overflow": overflown,
}


def main(folder: Path) -> None:
    """Work on the loaded model in each way; its hooks must be there and be called as before."""
    for way, work in WAYS.items():
        model = torch.load(folder / "model.pt", weights_only=False)
        model.train()
        were, counted = there(model), calls(model)
        assert were
        assert max(counted.values())
        RemovableHandle.next_id = min(key for _, _, key in were)
        work(model, folder)
        now = there(model)
        lost = [where for where in were.keys() | now.keys() if were.get(where) is not now.get(where)]
        again = calls(model)
        silent = [where for where in counted if counted[where] != again.get(where)]
        print(way, "lost:", lost, "called otherwise:", silent)
