"""Tensors that wait to be measured, as on a GPU: the values are right, or the trace says that they are later ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hfpatch
from hfpatch.numerics.statistics_lots import Lots
from hfpatch.numerics.statistics_plain import DeviceRows
from hfpatch.testing import example_inputs, tiny_model
from hfpatch.tracing import watch


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors of a step wait, on this CPU too."""
    monkeypatch.setattr(watch, "rows", lambda _: Lots(DeviceRows(), 10**12))


class Writes(nn.Module):
    """Two linear layers; what the first returns is multiplied by 1,000 in place."""

    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.activation, self.last = nn.Linear(4, 4), activation, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = h.mul_(1000) if self.activation is None else self.activation(h)
        return self.last(h).square().mean()


def largest_of(h: torch.Tensor | None) -> float:
    assert h is not None
    return float(h.abs().max())


@pytest.mark.usefixtures("waiting")
class TestWrittenInPlace:
    def test_is_said_and_then_measured_before(self) -> None:
        torch.manual_seed(0)
        model, x = Writes(), torch.randn(3, 4)
        true = largest_of(model.first(x).detach())
        with hfpatch.trace(model) as t:
            for _ in range(2):
                model(x).backward()
        early, now = (next(e for e in s.events if (e.module, e.role) == ("first", "output")) for s in t.steps)
        assert (early.late, now.late) == (True, False)
        assert early.stats.largest == pytest.approx(1000 * true)
        assert now.stats.largest == pytest.approx(true)
        assert "wrote to it in place" in early.label
        assert "wrote to it in place" not in now.label
        assert str(t["first"]).count("wrote to it in place") == 1

    def test_by_a_module_that_says_so_is_measured_before(self) -> None:
        torch.manual_seed(0)
        model, x = Writes(nn.ReLU(inplace=True)), torch.randn(3, 4)
        true = model.first(x).detach()
        with hfpatch.trace(model) as t:
            model(x).backward()
        found = t["first"].output
        assert found is not None
        assert found.least == pytest.approx(float(true.min()))
        assert found.least < 0

    def test_a_fault_is_still_named(self) -> None:
        """The later values are not finite; the module whose output they overwrote is not blamed."""

        class Overflows(Writes):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.last(self.first(x).mul_(1e38).mul_(1e38)).square().mean()

        torch.manual_seed(0)
        model, x = Overflows(), torch.randn(3, 4)
        with hfpatch.trace(model) as t:
            model(x)
        assert t.first_bad is not None
        assert (t.first_bad.module, t.first_bad.operation) == ("", "multiplication")


@pytest.mark.usefixtures("waiting")
@pytest.mark.parametrize("level", ["blocks", "modules"])
def test_the_figures_are_those_that_are_measured_at_once(level: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama").train()
    batch = example_inputs(model)

    def seen() -> list[tuple[Any, ...]]:
        model.zero_grad()
        with hfpatch.trace(model, level=level) as t:
            model(**batch).loss.backward()
        events = t.steps[0].events
        return [(e.phase, e.module, e.role, e.name, e.nonfinite, e.stats.least, e.stats.most) for e in events]

    together = seen()
    monkeypatch.undo()
    alone = seen()
    assert [e[:5] for e in together] == [e[:5] for e in alone]
    for a, b in zip(together, alone, strict=True):
        assert a[5:] == pytest.approx(b[5:], rel=1e-4, abs=1e-12)


def test_gradients_that_an_optimizer_frees_in_the_backward_pass() -> None:
    model = tiny_model("llama").train()
    batch = example_inputs(model)
    model(**batch).loss.backward()
    want = {n: largest_of(p.grad) for n, p in model.named_parameters()}
    model.zero_grad()

    def stepped(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.0)
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(stepped) for p in model.parameters()]
    with hfpatch.trace(model) as t:
        model(**batch).loss.backward()
    for handle in handles:
        handle.remove()
    assert dict(t.largest_gradients(1000)) == pytest.approx(want, rel=1e-5)
    assert not any(p._backward_hooks for p in model.parameters())


def test_no_hook_stays_on_a_leaf() -> None:
    """A prompt that is trained is given to the model each step: its hooks would add up."""
    model = tiny_model("llama").train()
    prompt = nn.Parameter(torch.randn(1, 5, model.config.hidden_size))
    seen = []
    for _ in range(2):
        with hfpatch.trace(model) as t:
            model(inputs_embeds=prompt, labels=torch.zeros(1, 5, dtype=torch.long)).loss.backward()
        assert not prompt._backward_hooks
        seen.append(t[""].input_gradient)
    assert all(s is not None and s.largest > 0 for s in seen)
