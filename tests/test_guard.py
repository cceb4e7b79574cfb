"""The guard in a plain loop."""

from __future__ import annotations

import copy
import io
import json
import math
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import get_scheduler

from hfpatch.errors import GuardStop, InputError
from hfpatch.guarding.gradient_norms import clip_, tensor_norms
from hfpatch.guarding.guard import Guard
from hfpatch.guarding.history import WARMUP
from hfpatch.guarding.outcome import Reason
from hfpatch.lab.tiny import tiny_model

NAN, INF = math.nan, math.inf


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def adamw(model: nn.Module, **kwargs: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **kwargs)


def batches(n: int, seed: int = 1) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 6, generator=made) for _ in range(n)]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def everything(*parts: Any) -> str:
    """Weights, optimizer state and schedule as text, bit for bit."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return (str(value.dtype), value.detach().double().tolist())
        if isinstance(value, dict):
            return {str(k): plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value

    return repr([plain(p.state_dict()) for p in parts])


def poison(model: nn.Module, x: torch.Tensor, kind: str) -> torch.Tensor:
    loss = loss_of(model, x)
    if kind == "nan loss":
        return loss * NAN
    if kind == "inf loss, finite gradients":
        return loss + INF
    if kind == "nan gradient":
        weight = next(model.parameters())
        return loss + (weight * 0).sum().sqrt()  # value 0, gradient 0 * inf
    if kind == "explosion":
        return loss * 1e9
    assert kind == "no labels"
    return nn.functional.cross_entropy(model(x), torch.full((4,), -100))


REASONS = {
    "nan loss": Reason.LOSS,
    "inf loss, finite gradients": Reason.LOSS,
    "nan gradient": Reason.GRADIENTS,
    "explosion": Reason.EXPLOSION,
    "no labels": Reason.NO_LABELS,
}


@pytest.mark.parametrize("kind", REASONS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_bad_batch_changes_nothing(kind: str, fused: bool, scaled: bool) -> None:
    model = net()
    optimizer = adamw(model, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    guard = Guard(model, optimizer, scheduler, scaler=scaler, explode_at=100.0, on_device=fused, verbose=False)
    good = batches(3)
    assert guard.step(loss_of(model, good[0])).stepped
    guard.settle()
    before = everything(model, optimizer, scheduler)
    outcome = guard.step(poison(model, good[1], kind))
    assert outcome.skipped
    expected = REASONS[kind]
    if scaled and kind == "nan gradient":
        expected = Reason.OVERFLOW
        assert scaler is not None
        assert scaler.get_scale() == 512.0
    assert outcome.reason == expected
    assert everything(model, optimizer, scheduler) == before
    assert all(p.grad is None for p in model.parameters())
    assert guard.step(loss_of(model, good[2])).stepped
    guard.settle()
    assert scheduler.last_epoch == 2


@pytest.mark.parametrize("on_device", [False, True])
def test_a_healthy_run_is_bit_identical_to_one_without_a_guard(on_device: bool) -> None:
    plain, guarded = net(), net()
    left, right = adamw(plain, fused=True), adamw(guarded, fused=True)
    left_rate = torch.optim.lr_scheduler.CosineAnnealingLR(left, 8)
    right_rate = torch.optim.lr_scheduler.CosineAnnealingLR(right, 8)
    guard = Guard(guarded, right, right_rate, max_grad_norm=0.05, on_device=on_device)
    for x in batches(8):
        loss_of(plain, x).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        left.step()
        left_rate.step()
        left.zero_grad()
        outcome = guard.step(loss_of(guarded, x))
        assert outcome.facts.norm == norm.item()
    guard.settle()
    assert everything(plain, left, left_rate) == everything(guarded, right, right_rate)


def test_a_spike_against_the_running_median() -> None:
    model = net()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1e-4), explode_at=None, spike_at=10.0, verbose=False)
    data = batches(WARMUP + 2)
    for x in data[:WARMUP]:
        assert guard.step(loss_of(model, x)).stepped
    outcome = guard.step(loss_of(model, data[-1]) * 300)
    assert outcome.reason == Reason.SPIKE
    assert outcome.facts.norm is not None
    assert outcome.facts.norm > 10 * outcome.facts.median
    assert "largest gradients: " in str(outcome)
    assert guard.step(loss_of(model, data[-1])).stepped, "the spike must not enter the median"


def test_broken_gradients_are_named_from_the_loss_down() -> None:
    model = net()
    guard = Guard(model, adamw(model), verbose=False)
    x = batches(1)[0]
    hidden = model[1](model[0](x))
    hidden.register_hook(lambda g: g * NAN)  # what lies above this is healthy
    outcome = guard.step(model[2](hidden).square().mean())
    assert outcome.facts.blame == ("2 of 4 gradients not finite, nearest the loss: 0.bias, 0.weight",)


def test_accumulation_matches_one_large_batch_and_an_empty_micro_batch_spoils_nothing() -> None:
    whole, parts = net(), net()
    x = torch.cat(batches(2))
    loss_of(whole, x).backward()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    guard = Guard(parts, torch.optim.SGD(parts.parameters(), lr=0.1), max_grad_norm=None, accumulation_steps=2)
    assert guard.step(loss_of(parts, x[:4])).accumulating
    outcome = guard.step(loss_of(parts, x[4:]))
    assert outcome.stepped
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    # the second micro-batch has no label: NaN loss, no gradient; the first one's is kept
    reference = copy.deepcopy(parts)
    (loss_of(reference, x[:4]) / 2).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    guard.step(loss_of(parts, x[:4]))
    outcome = guard.step(poison(parts, x[4:], "no labels"))
    assert outcome.stepped
    assert (outcome.facts.empty, outcome.facts.micro_batches) == (1, 2)
    for a, b in zip(reference.parameters(), parts.parameters(), strict=True):
        assert torch.equal(a, b)
    # a NaN that does leave gradients spoils the window, wherever it stands
    for order in ((NAN, 1.0), (1.0, NAN)):
        before = everything(parts)
        for factor in order:
            outcome = guard.step(loss_of(parts, x[:4]) * factor)
        assert outcome.reason == Reason.LOSS
        assert everything(parts) == before


def test_accumulation_by_token_count_equals_the_true_token_mean(ids: torch.Tensor) -> None:
    whole = tiny_model("llama")
    parts = copy.deepcopy(whole)
    labels = ids.clone()
    labels[0, 3:] = -100
    whole(input_ids=ids, labels=labels).loss.backward()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    guard = Guard(
        parts, torch.optim.SGD(parts.parameters(), lr=0.1), max_grad_norm=None, accumulation_steps=2, divide_loss=False
    )
    count = (labels[:, 1:] != -100).sum()
    for i in range(2):
        out = parts(input_ids=ids[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=count)
        outcome = guard.step(out.loss)
    assert outcome.stepped
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_tokens_say_what_a_loss_cannot() -> None:
    model = net()
    guard = Guard(model, adamw(model), verbose=False)
    x = batches(1)[0]
    assert guard.step(poison(model, x, "no labels"), tokens=0).reason == Reason.NO_LABELS
    assert guard.step(poison(model, x, "no labels"), tokens=torch.tensor(3)).reason == Reason.LOSS


def test_a_real_model_without_labels(ids: torch.Tensor) -> None:
    model = tiny_model("llama")
    guard = Guard(model, adamw(model), verbose=False)
    nothing = torch.full_like(ids, -100)
    for kwargs, reason in (
        ({}, Reason.NO_LABELS),  # 0 / 0
        ({"num_items_in_batch": torch.tensor(0)}, Reason.NO_LABELS),
        ({"num_items_in_batch": torch.tensor(7)}, Reason.ZERO),  # 0 / 7, as a loss that is rightly 0
    ):
        before = everything(model)
        outcome = guard.step(model(input_ids=ids, labels=nothing, **kwargs).loss)
        assert outcome.reason == reason
        assert "no supervised token" in str(outcome)
        assert everything(model) == before
    assert guard.step(model(input_ids=ids, labels=ids).loss).stepped


@pytest.mark.parametrize("on_device", [False, True])
def test_a_loss_that_is_rightly_0_never_stops_a_run(on_device: bool, capfd: pytest.CaptureFixture[str]) -> None:
    model = net()
    guard = Guard(model, adamw(model, fused=True), max_skips=3, on_device=on_device)
    x = batches(1)[0]
    guard.step(loss_of(model, x))
    guard.settle()
    before = everything(model)
    for _ in range(7):  # a policy gradient whose advantages are all 0
        assert guard.step((model(x).sum(-1) * torch.zeros(4)).mean()).reason == Reason.ZERO
    guard.settle()
    assert everything(model) == before
    assert capfd.readouterr().err.count("loss and gradients exactly 0") == 1
    assert guard.metrics()["guard/skipped_zero"] == 7
    # told to hold no token, or NaN: then a row of them is a fault of the data
    for tokens, factor in ((0, 0.0), (None, NAN)):
        guard = Guard(model, adamw(model, fused=True), max_skips=3, on_device=on_device, verbose=False)
        with pytest.raises(GuardStop, match="3 x no supervised token"):
            for _ in range(5):
                loss = loss_of(model, x) * 0.0 if tokens == 0 else poison(model, x, "no labels") * factor
                guard.step(loss, tokens=tokens)


def test_an_ordinary_overflow_is_counted_and_a_collapsed_scale_stops() -> None:
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    guard = Guard(model, adamw(model), scaler=scaler, explode_at=None, max_skips=2, verbose=False)
    x = batches(1)[0]
    scale, overflows = scaler.get_scale(), 0
    for _ in range(200):
        outcome = guard.step(loss_of(model, x) * 1e4)
        if outcome.stepped:
            break
        overflows += 1
        assert outcome.reason == Reason.OVERFLOW
        assert scaler.get_scale() == scale / 2
        scale = scaler.get_scale()
    assert outcome.stepped
    assert guard.metrics()["guard/overflows"] == overflows > 1
    assert guard.metrics()["guard/skipped"] == 0
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    guard = Guard(model, adamw(model), scaler=scaler, max_skips=2, verbose=False)
    assert guard.step(poison(model, x, "nan gradient")).reason == Reason.OVERFLOW
    assert guard.step(poison(model, x, "nan gradient")).reason == Reason.COLLAPSED
    with pytest.raises(GuardStop, match="2 x loss scale collapsed"):
        guard.step(poison(model, x, "nan gradient"))


@pytest.mark.parametrize("on_device", [False, True])
def test_it_stops_after_a_row_of_skips_with_the_history(on_device: bool, capfd: pytest.CaptureFixture[str]) -> None:
    model = net()
    guard = Guard(model, adamw(model, fused=True), max_skips=3, on_device=on_device)
    x = batches(1)[0]
    guard.step(loss_of(model, x))
    before = everything(model)
    with pytest.raises(GuardStop, match="3 steps in a row were skipped \\(2 to 4\\)") as stop:
        for _ in range(5):
            guard.step(poison(model, x, "nan loss"))
    assert "the weights are those after step 1" in str(stop.value)
    assert [f.step for f in stop.value.history] == [2, 3, 4]
    assert str(copy.copy(stop.value)) == str(stop.value), "as pickle rebuilds it, for loggers and worker processes"
    assert capfd.readouterr().err.count("skipped, non-finite loss") == 3
    if not on_device:
        assert everything(model) == before


def test_good_steps_end_a_row() -> None:
    model = net()
    guard = Guard(model, adamw(model), max_skips=2, verbose=False)
    x = batches(1)[0]
    for _ in range(4):
        assert guard.step(poison(model, x, "nan loss")).skipped
        assert guard.step(loss_of(model, x)).stepped
    assert guard.metrics()["guard/skipped_loss"] == 4


@pytest.mark.parametrize("on_device", [False, True])
def test_weights_ruined_by_a_step_stop_the_run(on_device: bool) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38, fused=True)
    guard = Guard(model, optimizer, max_grad_norm=None, explode_at=None, on_device=on_device, verbose=False)
    with pytest.raises(GuardStop, match=r"parameters are not finite after step 1: 0\.weight"):
        guard.step(loss_of(model, batches(1)[0]) * 1e4)
        guard.settle()
    model = net()
    with torch.no_grad():
        model[2].bias[0] = NAN
    guard = Guard(model, adamw(model), check_parameters=0, verbose=False)
    with pytest.raises(GuardStop, match=r"1 of 4 parameters are not finite after step 1: 2\.bias"):
        guard.step(loss_of(model, batches(1)[0]))


@pytest.mark.parametrize("on_device", [False, True])
def test_stop_and_resume_is_bit_identical(on_device: bool) -> None:
    data = batches(WARMUP + 12)
    spikes = {WARMUP + 2, WARMUP + 8}

    def fresh() -> tuple[Any, ...]:
        model = net()
        optimizer = adamw(model, fused=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)
        guard = Guard(model, optimizer, scheduler, scaler=scaler, spike_at=8.0, on_device=on_device, verbose=False)
        return model, optimizer, scheduler, scaler, guard

    def run(parts: tuple[Any, ...], start: int, stop: int) -> list[str]:
        said = []
        for i in range(start, stop):
            loss = loss_of(parts[0], data[i]) * (200.0 if i in spikes else 1.0)
            said.append(str(parts[-1].step(loss)))
        return said

    whole = fresh()
    said = run(whole, 0, len(data))
    assert sum("running median" in s for s in said) == len(spikes)
    first = fresh()
    half = WARMUP + 5
    assert run(first, 0, half) == said[:half]
    saved = json.loads(json.dumps(first[-1].state_dict()))
    torch.save(first[-1].state_dict(), kept := io.BytesIO())  # with steps that were skipped
    kept.seek(0)
    assert torch.load(kept, weights_only=True) == first[-1].state_dict()
    states = [copy.deepcopy(p.state_dict()) for p in first[:-1]]
    second = fresh()
    for part, state in zip(second[:-1], states, strict=True):
        part.load_state_dict(state)
    second[-1].load_state_dict(saved)
    assert run(second, half, len(data)) == said[half:]
    assert everything(*second[:-1]) == everything(*whole[:-1])
    assert second[-1].state_dict() == whole[-1].state_dict()


def test_a_decision_on_the_device_is_in_no_checkpoint_twice_or_never() -> None:
    """Nothing reads the outcomes, and the schedule is saved before the guard, or after it."""
    data = batches(6)

    def run(start: int, stop: int, states: dict[str, Any] | None = None, order: int = 1) -> tuple[str, dict[str, Any]]:
        model = net()
        optimizer = adamw(model, fused=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        guard = Guard(model, optimizer, scheduler, on_device=True, verbose=False)
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "guard": guard}
        for name in parts if states else ():
            parts[name].load_state_dict(states[name])
        for i in range(start, stop):
            guard.step(loss_of(model, data[i]) * (NAN if i == 2 else 1.0))
        saved = {name: copy.deepcopy(parts[name].state_dict()) for name in list(parts)[::order]}
        guard.settle()
        return everything(model, optimizer, scheduler), saved

    whole, _ = run(0, 6)
    for half in (3, 4):  # after a skip, and after a step
        for order in (1, -1):
            _, saved = run(0, half, order=order)
            assert run(half, 6, saved)[0] == whole


def test_no_state_in_the_middle_of_a_window() -> None:
    model = net()
    guard = Guard(model, adamw(model), accumulation_steps=2)
    guard.step(loss_of(model, batches(1)[0]))
    with pytest.raises(InputError, match="after 1 of 2 micro-batches"):
        guard.state_dict()


def test_refusals() -> None:
    half = net().half()
    with pytest.raises(InputError, match=r"eps=1e-08 .* 0 in torch.float16 of 0.weight"):
        Guard(half, torch.optim.Adam(half.parameters()))
    sgd = torch.optim.SGD(half.parameters(), lr=0.1)
    Guard(half, sgd)
    with pytest.raises(InputError, match=r"0\.weight is float16 and trains under a GradScaler"):
        Guard(half, sgd, scaler=torch.amp.GradScaler("cpu"))
    Guard(half, sgd, scaler=torch.amp.GradScaler("cpu", enabled=False))
    brain = net().bfloat16()
    Guard(brain, torch.optim.Adam(brain.parameters()))
    model = net()
    with pytest.raises(InputError, match="on_device=True, but this AdamW"):
        Guard(model, adamw(model, foreach=True), on_device=True)
    with pytest.raises(InputError, match="ReduceLROnPlateau"):
        optimizer = adamw(model)
        Guard(model, optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    with pytest.raises(InputError, match="GreedyLR needs a metric"):
        Guard(model, optimizer, get_scheduler("greedy", optimizer))
    with pytest.raises(InputError, match="max_skips=0"):
        Guard(model, adamw(model), max_skips=0)
    with pytest.raises(InputError, match="want a torch optimizer"):
        Guard(model, model)
    guard = Guard(model, adamw(model))
    with pytest.raises(InputError, match=r"one number; got shape \(4, 3\)"):
        guard.check_and_step(model(batches(1)[0]))
    other = net(1)
    with pytest.raises(InputError, match="has a gradient after backward"):
        Guard(model, adamw(model)).step(loss_of(other, batches(1)[0]))


class FakeLinear4bit(nn.Linear):
    """As bitsandbytes' one looks: a packed weight with a quant_state, and a compute dtype."""

    def __init__(self) -> None:
        super().__init__(6, 8)
        self.weight: Any = nn.Parameter(torch.zeros(24, 1, dtype=torch.uint8), requires_grad=False)
        self.weight.quant_state = object()
        self.compute_dtype = torch.float16


def test_a_quantised_base_that_computes_in_float16_is_warned_about(capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(FakeLinear4bit(), nn.Linear(8, 3))
    guard = Guard(model, adamw(model))
    assert len(guard.warnings) == 1
    assert "1 quantised layers compute in float16 (0 first)" in guard.warnings[0]
    assert "bnb_4bit_compute_dtype=torch.bfloat16" in capfd.readouterr().err
    model[0].compute_dtype = torch.float32
    assert Guard(model, adamw(model)).warnings == ()
    assert "GradScaler" in Guard(model, adamw(model), scaler=torch.amp.GradScaler("cpu")).warnings[0]


def test_backward_called_by_the_caller() -> None:
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1.0), scaler=scaler, max_grad_norm=None)
    x = batches(1)[0]
    reference = copy.deepcopy(model)
    loss_of(reference, x).backward()
    torch.optim.SGD(reference.parameters(), lr=1.0).step()
    loss = loss_of(model, x)
    scaler.scale(loss).backward()
    outcome = guard.check_and_step(loss)
    assert outcome.stepped
    assert outcome.facts.scale == 1024.0
    for a, b in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_accelerate_accumulates_schedules_and_says_what_was_skipped() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net()
    raw = adamw(model, fused=True)
    model, optimizer, scheduler = accelerator.prepare(model, raw, torch.optim.lr_scheduler.StepLR(raw, 1, 0.5))
    guard = Guard(model, optimizer, scheduler, accelerator=accelerator, verbose=False)
    reference = net()
    steps = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    seen = []
    for i, x in enumerate(batches(6)):
        with accelerator.accumulate(model):
            bad = i == 3
            outcome = guard.step(loss_of(model, x) * (NAN if bad else 1.0))
            seen.append(outcome.facts.kind)
            if not outcome.accumulating:
                assert accelerator.optimizer_step_was_skipped == outcome.skipped
        (loss_of(reference, x) / 2).backward()
        if i in (1, 5):
            nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            steps.param_groups[0]["lr"] = 1e-2 * (1.0 if i == 1 else 0.5)
            steps.step()
        if i % 2:
            steps.zero_grad()
    assert seen == ["accumulating", "stepped", "accumulating", "skipped", "accumulating", "stepped"]
    assert scheduler.scheduler.last_epoch == 2
    assert everything(model) == everything(reference)


def test_norms_of_half_gradients_are_summed_in_float32() -> None:
    wide = torch.full((4096, 300), 173.0, dtype=torch.float16)
    norms = tensor_norms([wide, torch.ones(3), torch.ones(5, dtype=torch.bfloat16)])
    exact = torch.tensor([wide.double().norm().item(), 3**0.5, 5**0.5], dtype=torch.float64)
    torch.testing.assert_close(norms.double(), exact, rtol=1e-4, atol=0)
    assert norms[0] > torch.finfo(torch.float16).max
    grads = [torch.tensor([3.0, 4.0]), torch.tensor([12.0])]
    clip_(grads, 1.3, torch.tensor(13.0))
    torch.testing.assert_close(torch.cat(grads), torch.tensor([0.3, 0.4, 1.2]))
