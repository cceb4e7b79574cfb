"""Which parameters a guard judges, and which optimizers and losses it refuses."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from hfpatch.errors import GuardStop, InputError
from hfpatch.guarding.guard import Guard
from hfpatch.guarding.outcome import Reason
from tests.test_guard import adamw, batches, everything, loss_of, net


def test_parameters_that_join_the_optimizer_later_are_judged_clipped_and_looked_at() -> None:
    model, reference = net(), net()
    x = batches(1)[0]

    def frozen(of: nn.Sequential) -> torch.optim.SGD:
        of[0].requires_grad_(False)
        return torch.optim.SGD(of[2].parameters(), lr=0.1)

    def thaw(of: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        of[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(of[0].parameters())})

    optimizer, plain = frozen(model), frozen(reference)
    guard = Guard(model, optimizer, max_grad_norm=0.01, verbose=False)
    for step in range(3):
        if step == 1:
            thaw(model, optimizer)
            thaw(reference, plain)
        assert guard.step(loss_of(model, x)).stepped
        plain.zero_grad()
        loss_of(reference, x).backward()
        nn.utils.clip_grad_norm_([p for p in reference.parameters() if p.requires_grad], 0.01)
        plain.step()
    assert everything(model) == everything(reference)
    before = everything(model)
    outcome = guard.step(loss_of(model, x) + (model[0].weight * 0).sum().sqrt())  # NaN in the new part only
    assert outcome.reason == Reason.GRADIENTS
    assert outcome.facts.blame == ("1 of 4 gradients not finite, nearest the loss: 0.weight",)
    assert everything(model) == before
    with torch.no_grad():
        model[0].bias[0] = math.inf
    with pytest.raises(GuardStop, match=r"parameters are not finite .*0\.bias"):
        guard.step(model[2](torch.ones(4, 8)).square().mean() + model[0].weight.square().mean())


def test_parameters_may_join_in_the_middle_of_a_window() -> None:
    model = net()
    optimizer = adamw(model[2])
    guard = Guard(model, optimizer, accumulation_steps=2, verbose=False)
    x = batches(1)[0]
    assert guard.step(loss_of(model, x)).accumulating
    optimizer.add_param_group({"params": list(model[0].parameters())})
    assert guard.step(loss_of(model, x) + (model[0].weight * 0).sum().sqrt()).reason == Reason.GRADIENTS


def test_an_optimizer_of_another_model_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    model = net()
    stale = adamw(copy.deepcopy(model))
    with pytest.raises(InputError, match="AdamW holds 4 parameters, none of them of this Sequential"):
        Guard(model, stale)
    both = torch.optim.AdamW([model[0].weight, model[0].bias, nn.Parameter(torch.ones(())), *model[2].parameters()])
    guard = Guard(model, both)
    assert len(guard.warnings) == 1
    assert "1 of 5 parameters that AdamW holds are not this Sequential's (first: its parameter 2)" in guard.warnings[0]
    assert guard.warnings[0] in capfd.readouterr().err


def test_what_another_optimizer_steps_is_neither_judged_nor_clipped_nor_cleared() -> None:
    model, reference = net(), net()
    heads, bodies = [m[2].parameters() for m in (model, reference)], [m[0].parameters() for m in (model, reference)]
    head, plain_head = (torch.optim.AdamW(p, lr=1e-2) for p in heads)
    body, plain_body = (torch.optim.SGD(p, lr=0.1) for p in bodies)
    first = Guard(model, head, max_grad_norm=0.01, verbose=False)
    second = Guard(model, body, max_grad_norm=None, verbose=False)
    assert "2 parameters of Sequential require gradients and are not in AdamW (0.weight, 0.bias)" in first.warnings[0]
    for x in batches(4):
        loss = loss_of(model, x)
        assert first.step(loss).stepped
        assert second.check_and_step(loss).stepped
        loss_of(reference, x).backward()
        nn.utils.clip_grad_norm_(reference[2].parameters(), 0.01)
        for optimizer in (plain_head, plain_body):
            optimizer.step()
            optimizer.zero_grad()
    assert everything(model, head, body) == everything(reference, plain_head, plain_body)
    # one loss, two judgements
    before = everything(model[0])
    loss = loss_of(model, batches(1)[0]) + (model[0].weight * 0).sum().sqrt()
    assert first.step(loss).stepped
    assert second.check_and_step(loss).reason == Reason.GRADIENTS
    assert everything(model[0]) == before


def test_gradients_outside_the_optimizer_are_not_judged_with_the_loss_scale() -> None:
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    guard = Guard(model, adamw(model[2]), scaler=scaler, verbose=False)
    for x in batches(3):
        outcome = guard.step(loss_of(model, x))
        assert outcome.stepped, outcome
        assert outcome.facts.norm is not None
        assert outcome.facts.norm < 10


def test_a_window_without_any_gradient_is_no_end_under_a_scaler() -> None:
    model = net()
    lone = nn.Parameter(torch.ones(()))
    guard = Guard(model, adamw(model), scaler=torch.amp.GradScaler("cpu"), verbose=False)
    assert guard.step(loss_of(model, batches(1)[0])).stepped
    assert guard.step(lone * 0.0).reason == Reason.ZERO


def test_fused_sgd_with_momentum_stays_on_the_host() -> None:
    """Torch leaves its momentum uninitialised where the first step is skipped by found_inf."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    with pytest.raises(InputError, match="SGD with momentum cannot skip by itself"):
        Guard(model, optimizer, on_device=True)
    assert not Guard(model, optimizer).on_device
    assert Guard(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), on_device=True).on_device


def test_optimizers_and_layers_that_cannot_be_judged_are_refused() -> None:
    model = net()
    with pytest.raises(InputError, match="LBFGS calls the model again inside its step"):
        Guard(model, torch.optim.LBFGS(model.parameters()))
    words: Any = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    with pytest.raises(InputError, match=r"0 has sparse gradients \(sparse=True\)"):
        Guard(words, torch.optim.SGD(words.parameters(), lr=0.1))
    Guard(words, torch.optim.SGD(words[1].parameters(), lr=0.1), verbose=False)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda out: out.square(), r"one number; got shape \(4, 3\)"),
        (lambda out: out.detach().mean(), "this loss has no autograd graph"),
        (lambda _: torch.tensor(1.0), "this loss has no autograd graph"),
        (lambda _: 1.0, "a tensor of one number; got float"),
        (lambda out: {"loss": out.mean()}, r"got dict; pass output\.loss"),
    ],
)
def test_what_is_no_loss_is_refused_before_anything_is_changed(loss: Any, said: str) -> None:
    model = net()
    optimizer = adamw(model)
    guard = Guard(model, optimizer, verbose=False)
    x = batches(1)[0]
    before = everything(model, optimizer)
    with pytest.raises(InputError, match=said):
        guard.step(loss(model(x)))
    assert everything(model, optimizer) == before
    assert guard.step(loss_of(model, x)).facts.step == 1
