"""A guard judges by the run's own history: what stands out is skipped or clipped, what is usual is not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfpatch
from hfpatch.errors import GuardStop, InputError
from hfpatch.guarding.guard import Guard
from hfpatch.guarding.history import FAR, WARMUP, WINDOW, History
from hfpatch.guarding.outcome import Reason
from tests.test_guard import adamw, batches, loss_of, net
from tests.test_guard_trainer import logs, rows, trainer


def guarded(**options: Any) -> tuple[nn.Sequential, Guard]:
    model = net()
    options = {"verbose": False, **options}
    return model, Guard(model, torch.optim.SGD(model.parameters(), lr=1e-5), **options)


def warmed(**options: Any) -> tuple[nn.Sequential, Guard, torch.Tensor]:
    model, guard = guarded(**options)
    data = batches(WARMUP + 1)
    for x in data[:-1]:
        assert guard.step(loss_of(model, x)).stepped
    return model, guard, data[-1]


def louder(model: nn.Module, x: torch.Tensor, factor: float) -> torch.Tensor:
    """A loss as usual, whose gradients are `factor` times as large."""
    loss = loss_of(model, x)
    return loss.detach() + factor * (loss - loss.detach())


def test_a_warm_up_skips_only_what_is_not_finite() -> None:
    model, guard = guarded()
    data = batches(WARMUP)
    for i, x in enumerate(data):
        assert guard.step(loss_of(model, x) * (1e4 if i % 3 == 1 else 1.0)).stepped, i
    assert guard.step(loss_of(model, data[0]) * math.nan).reason == Reason.LOSS


def test_a_healthy_projector_with_large_norms_is_never_skipped() -> None:
    model, guard = guarded()
    for i, x in enumerate(batches(3 * WARMUP)):
        outcome = guard.step(loss_of(model, x) * 500.0 / (1 + i / 10))  # norms of hundreds, falling
        assert outcome.stepped, str(outcome)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_large_norm_with_an_unusual_loss_is_a_spike(on_device: bool) -> None:
    model = net()
    optimizer = adamw(model, fused=True)
    guard = Guard(model, optimizer, on_device=on_device, verbose=False)
    data = batches(WARMUP + 2)
    for x in data[:-2]:
        assert guard.step(loss_of(model, x)).stepped
    guard.settle()
    before = [p.detach().clone() for p in model.parameters()]
    outcome = guard.step(loss_of(model, data[-1]) * 60)
    assert outcome.reason == Reason.SPIKE, str(outcome)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("max_grad_norm", [None, 1e9])
def test_a_large_norm_with_a_usual_loss_is_clipped_to_the_median(on_device: bool, max_grad_norm: float | None) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    guard = Guard(model, optimizer, max_grad_norm=max_grad_norm, on_device=on_device, verbose=False)
    data = batches(WARMUP + 1)
    for x in data[:-1]:
        assert guard.step(loss_of(model, x)).stepped
    guard.settle()
    before = [p.detach().clone() for p in model.parameters()]
    outcome = guard.step(louder(model, data[-1], 40.0))
    assert outcome.stepped
    assert outcome.facts.clipped
    assert outcome.facts.norm is not None
    assert outcome.facts.norm > 10 * outcome.facts.median
    moved = math.sqrt(sum(float((p - b).square().sum()) for p, b in zip(model.parameters(), before, strict=True)))
    assert moved == pytest.approx(1e-3 * outcome.facts.median, rel=1e-3)
    assert guard.metrics()["guard/clipped"] == 1
    assert "clipped to the median norm" in str(outcome)


def test_a_norm_beyond_any_seen_in_a_healthy_run_is_a_spike_whatever_the_loss_is() -> None:
    model, guard, x = warmed()
    assert guard.step(louder(model, x, 20 * FAR)).reason == Reason.SPIKE


def test_on_spike_clip_skips_nothing_that_is_finite() -> None:
    model, guard, x = warmed(on_spike="clip")
    outcome = guard.step(loss_of(model, x) * 1e6)
    assert outcome.stepped
    assert outcome.facts.clipped


def test_a_new_level_is_learnt() -> None:
    model, guard, x = warmed()
    clipped = 0
    for _ in range(WINDOW):
        outcome = guard.step(louder(model, x, 40.0))
        assert outcome.stepped
        clipped += outcome.facts.clipped
    assert 0 < clipped < WINDOW
    assert not guard.step(louder(model, x, 40.0)).facts.clipped


def test_without_a_limit_nothing_stands_out() -> None:
    model, guard, x = warmed(spike_at=None)
    outcome = guard.step(loss_of(model, x) * 1e6)
    assert outcome.stepped
    assert not outcome.facts.clipped


def test_the_history_survives_json_and_an_older_state() -> None:
    history = History(10.0, "skip")
    for i in range(WARMUP + 3):
        history.add(i + 1.0, 2.0)
    saved = json.loads(json.dumps(history.state_dict()))
    again = History(10.0, "skip")
    again.load_state_dict(saved)
    assert again.state_dict() == history.state_dict()
    assert again.usual() == history.usual()
    assert again.usual().norm < math.inf
    older = {k: v for k, v in saved.items() if k != "losses"}
    again.load_state_dict(older)
    assert math.isnan(again.usual().median), "without losses nothing can be judged, so it warms up anew"


def test_a_norm_that_passes_float32_is_told_from_a_gradient_that_is_not_finite() -> None:
    model, guard = guarded()
    outcome = guard.step(loss_of(model, batches(1)[0]) * 1e22)
    assert outcome.reason == Reason.EXPLOSION
    assert outcome.facts.norm is not None
    assert 1e19 < outcome.facts.norm < math.inf
    assert "largest gradients: " in str(outcome)
    report = net()
    (loss_of(report, batches(1)[0]) * 1e22).backward()
    found = hfpatch.gradient_report(report)
    assert 1e19 < found.norm < math.inf
    exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in report.parameters() if p.grad is not None))
    assert found.norm == pytest.approx(exact, rel=1e-6)
    assert found.nonfinite == 0


@pytest.mark.parametrize("clear", [False, True])
def test_broken_gradients_outside_the_optimizer_are_named(clear: bool) -> None:
    model = net()
    guard = Guard(model, adamw(model[2]), clear_outside=clear, verbose=False)
    outcome = guard.step(loss_of(model, batches(1)[0]) * math.nan)
    said = "; ".join(outcome.facts.blame)
    assert "2 gradients of parameters outside the optimizer are not finite either: 0.weight, 0.bias" in said
    assert (model[0].weight.grad is None) == clear
    assert ("cleared" if clear else "clear_outside=True") in said


def test_norms_of_components() -> None:
    model = net()
    guard = Guard(model, adamw(model), components={"first": "0.*", "last": ["2.weight", "2.bias"]}, verbose=False)
    x = batches(1)[0]
    loss_of(model, x).backward()
    wanted = {
        name: math.sqrt(sum(float(p.grad.square().sum()) for p in part.parameters() if p.grad is not None))
        for name, part in (("first", model[0]), ("last", model[2]))
    }
    model.zero_grad()
    assert guard.step(loss_of(model, x)).norms == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(InputError, match="globs of parameter names as components="):
        Guard(model, adamw(model), components={"first": [3]}, verbose=False)  # type: ignore[dict-item, list-item]
    with pytest.raises(InputError, match="'skip' or 'clip' as on_spike="):
        Guard(model, adamw(model), on_spike="stop", verbose=False)  # type: ignore[arg-type]


def test_a_loop_in_which_every_step_was_skipped_stops_at_its_end() -> None:
    model, guard = guarded(max_skips=99)
    for x in batches(3):
        guard.step(loss_of(model, x) * math.nan)
    with pytest.raises(GuardStop, match=r"every one of 3 steps was skipped \(3 x non-finite loss\)"):
        guard.settle()


def test_components_in_a_trainer(tmp_path: Path) -> None:
    callback = hfpatch.GuardCallback(verbose=False, components={"head": "lm_head.*", "layers": "*layers*"})
    made = trainer(tmp_path, [callback], data=rows(()))
    made.train()
    last = logs(made)[-1]
    assert last["guard/norm/layers"] > 0
    assert last["guard/norm/layers"] <= last["guard/norm"]
    assert "guard/clipped" in last
