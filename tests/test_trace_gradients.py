"""`Trace.largest_gradients`: the module where the gradient became large comes before those that it was handed to."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import hfpatch
from hfpatch.testing import tiny_model
from tests.test_check import IDS


class Steep(torch.autograd.Function):
    """Does nothing forward; backward multiplies."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


class Stack(nn.Module):
    """Linear layers of unequal size, behind one of which the backward pass multiplies."""

    def __init__(self, at: int, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.at, self.factor = at, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i <= self.at:  # each layer below makes the gradient that it hands on still larger
                x = Steep.apply(x, self.factor if i == self.at else 30.0)
        return x.square().mean()


@pytest.mark.parametrize("factor", [1e6, 1e25, math.inf, math.nan])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_the_guilty_comes_first(at: int, factor: float) -> None:
    model = Stack(at, factor)
    with hfpatch.trace(model) as t:
        model(torch.randn(4, 8)).backward()
    found = t.largest_gradients(4)
    truth = {n: float(p.grad.abs().max()) for n, p in model.named_parameters() if p.grad is not None}
    assert max(truth, key=truth.__getitem__).startswith("layers.0.") or not math.isfinite(factor)
    assert {found[0][0], found[1][0]} == {f"layers.{at}.weight", f"layers.{at}.bias"}
    assert found[2][0].startswith("layers.0.") or not math.isfinite(found[2][1])
    assert f"layers.{at}" in found.began
    assert "The gradient became large between" in str(found)
    assert found.to_dict()["began"] == found.began


def test_the_later_layers_of_several_that_are_infinite_come_first() -> None:
    """What is infinite has no size: the order is that of the backward pass."""
    model = Stack(3, math.inf)
    with hfpatch.trace(model) as t:
        model(torch.randn(4, 8)).backward()
    assert [n.split(".")[1] for n, _ in t.largest_gradients(8)] == ["3", "3", "2", "2", "1", "1", "0", "0"]


def test_a_later_step_does_not_hide_where_it_began() -> None:
    model = Stack(2, math.nan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hfpatch.trace(model) as t:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).backward()
            optimizer.step()  # the second step has NaN everywhere
    assert t.largest_gradients(1)[0][0].startswith("layers.2.")


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "bloom"])
def test_a_healthy_model_is_sorted_by_size(architecture: str) -> None:
    model = tiny_model(architecture).train()
    with hfpatch.trace(model) as t:
        model(IDS, labels=IDS).loss.backward()
    found = t.largest_gradients(100)
    assert found.began == ""
    sizes = [size for _, size in found]
    assert sizes == sorted(sizes, reverse=True)
    assert not found.to_dict()["began"]


def test_a_tiny_rms_is_named() -> None:
    """A norm divides by the size of its input; with an input near 0 its backward multiplies by the inverse."""

    class Faint(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.before, self.norm, self.after = nn.Linear(16, 16), nn.RMSNorm(16, eps=1e-20), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(self.norm(self.before(x) * 1e-7)).square().mean()

    model = Faint()
    with hfpatch.trace(model) as t:
        model(torch.randn(4, 16)).backward()
    assert "norm" in t.largest_gradients(1).began
