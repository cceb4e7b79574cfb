"""Weights that are not finite: never saved over a good checkpoint, told once, and told at the end of a run too."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from hfpatch.errors import GuardStop
from hfpatch.guarding.callback import GuardCallback
from hfpatch.guarding.guard import Guard
from tests.ranks import launch
from tests.test_guard import adamw, batches, loss_of, net
from tests.test_guard_trainer import trainer, untouched


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("ask", ["settle", "state_dict"])
def test_a_ruin_in_the_last_step_is_told_when_asked(on_device: bool, ask: str) -> None:
    model = net()
    guard = Guard(model, adamw(model, fused=True), on_device=on_device, verbose=False)
    x = batches(1)[0]
    guard.step(loss_of(model, x))
    guard.settle()
    good = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    with pytest.raises(GuardStop, match=r"1 of 4 parameters are not finite after step 1: 0\.weight"):
        getattr(guard, ask)()
    # the caller goes back to a good checkpoint, and on: it was told
    model.load_state_dict(good)
    assert guard.step(loss_of(model, x)).stepped
    getattr(guard, ask)()


@pytest.mark.parametrize("on_device", [False, True])
def test_a_ruin_is_told_once_and_good_weights_go_on(on_device: bool) -> None:
    model = net()
    guard = Guard(model, adamw(model, fused=True), on_device=on_device, verbose=False)
    good = copy.deepcopy(model.state_dict())
    x = batches(1)[0]
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
    with pytest.raises(GuardStop, match="not finite"):
        guard.step(loss_of(model, x))
        guard.settle()
    model.load_state_dict(good)
    assert guard.step(loss_of(model, x)).stepped
    guard.settle()


class Ruin(TrainerCallback):
    """Makes a weight NaN after the guard has looked, as a card does whose answer comes one step late."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            with torch.no_grad():
                next(kwargs["model"].parameters()).fill_(math.nan)


@pytest.mark.parametrize(("strategy", "last"), [("steps", 2), ("epoch", 15)])  # eight steps in an epoch
def test_a_trainer_does_not_save_ruined_weights(tmp_path: Path, strategy: str, last: int) -> None:
    arguments: dict[str, Any] = {"save_strategy": strategy, "save_steps": 1, "save_total_limit": 1, "max_steps": 16}
    made = trainer(tmp_path, [GuardCallback(verbose=False), Ruin(last)], **arguments)
    with pytest.raises(GuardStop, match="1 of 39 parameters are not finite"):
        made.train()
    assert untouched(made)
    kept = [load_file(p / "model.safetensors") for p in tmp_path.glob("checkpoint-*")]
    assert len(kept) == 1, "the last good one"
    assert all(v.isfinite().all() for v in kept[0].values())


def test_a_trainer_tells_of_a_ruin_in_its_last_step(tmp_path: Path) -> None:
    made = trainer(tmp_path, [GuardCallback(verbose=False), Ruin(5)])
    with pytest.raises(GuardStop, match="not finite after step 6"):
        made.train()
    assert untouched(made)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_all_ranks_stop_for_a_ruin_and_go_on_alike(mode: str, tmp_path: Path) -> None:
    for found in launch(f"ruin-{mode}", 2, tmp_path):
        assert found["stops"] == ["settle", "state_dict", "step"]
        assert found["after"] == "stepped"


@pytest.mark.thorough
def test_ranks_of_a_trainer_do_not_save_ruined_weights(tmp_path: Path) -> None:
    assert [f["stop"] for f in launch("trainer-ruin", 2, tmp_path)] == [True, True]
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-1"]
    kept = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert all(v.isfinite().all() for v in kept.values())
