"""Ctrl-C during apply and revert leaves nothing that the next revert does not clean, without being told which patch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hfpatch
import hfpatch.numerics.modulation
from hfpatch.lab.tiny import COMPOSITES, tiny_model
from tests.interrupts import SUBJECTS, trials


@pytest.mark.parametrize("kind", sorted(SUBJECTS))
def test_an_interruption_is_cleaned_by_the_next_revert(kind: str) -> None:
    found = list(trials(kind, every=43, first=7))
    assert len(found) > 5
    assert [(where, left) for where, left in found if left] == []


@pytest.mark.thorough
@pytest.mark.parametrize("kind", sorted(SUBJECTS))
def test_an_interruption_at_every_line_is_cleaned_by_the_next_revert(kind: str) -> None:
    found = list(trials(kind))
    assert len(found) > 300
    assert [(where, left) for where, left in found if left] == []


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        nn.init.zeros_(self.b.weight)
        nn.init.zeros_(self.b.bias)
        self.during: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 1 + torch.tanh(self.b(self.a(x)))
        if self.during is not None:
            self.during()
        return x * factor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(x)


def bounded() -> tuple[Net, hfpatch.Applied]:
    model = Net()
    return model, hfpatch.apply(model, only="sigmoid-modulation", added_modules=["gate"], verbose=False)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A revert takes the modes of interrupted calls, which do nothing any more, off this thread's stack."""
    yield
    bounded()[1].revert()
    assert torch._C._len_torch_function_stack() == 0


TWO = torch.tensor(2.0)
STOCK = 1 + torch.tanh(TWO)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, RuntimeError])
def test_whatever_a_forward_raises_no_function_of_torch_is_another_afterwards(error: type[BaseException]) -> None:
    model, fix = bounded()

    def raises() -> None:
        raise error

    model.gate.during = raises
    with pytest.raises(error):
        model(torch.randn(2, 8))
    assert torch.equal(1 + torch.tanh(TWO), STOCK)
    assert torch.equal(torch.tanh(TWO) + 1, STOCK)
    model.gate.during = None
    nn.init.constant_(model.gate.b.bias, 100.0)
    assert torch.equal(model(torch.ones(1, 8)), torch.full((1, 8), 1.5))  # the next forward is patched again
    fix.revert()
    assert torch.equal(1 + torch.tanh(TWO), STOCK)
    assert torch._C._len_torch_function_stack() == 0


def test_what_is_compiled_after_an_interruption_is_its_own() -> None:
    """The first function of torch after the interruption is one that torch.compile traces."""
    torch._dynamo.reset()
    model, _ = bounded()

    def stop() -> None:
        raise KeyboardInterrupt

    model.gate.during = stop
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(2, 8))
    compiled = torch.compile(lambda x: 1 + torch.tanh(x), backend="eager", fullgraph=True)
    assert torch.equal(compiled(TWO), STOCK)
    model.gate.during = None
    model(torch.randn(2, 8))
    assert torch.equal(compiled(TWO), STOCK)


def test_what_is_compiled_inside_a_patched_call_is_patched_and_compiled_once() -> None:
    torch._dynamo.reset()
    model, _ = bounded()
    graphs: list[Any] = []
    seen: list[torch.Tensor] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: 1 + torch.tanh(x), backend=backend, fullgraph=True)
    model.gate.during = lambda: seen.append(compiled(TWO))
    for _ in range(3):
        model(torch.randn(2, 8))
    assert len(graphs) == 1
    assert torch.equal(seen[0], seen[2])
    assert float(seen[0]) < 1.5 < float(STOCK)


def test_in_every_thread() -> None:
    model, _ = bounded()
    seen: list[bool] = []

    def run() -> None:
        def stop() -> None:
            raise SystemExit

        model.gate.during = stop
        with pytest.raises(SystemExit):
            model(torch.randn(2, 8))
        seen.append(torch.equal(1 + torch.tanh(TWO), STOCK))

    for _ in range(2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert seen == [True, True]


def test_an_interrupted_call_keeps_none_of_its_tensors() -> None:
    import gc
    import weakref

    model, _ = bounded()

    def stop() -> None:
        raise KeyboardInterrupt

    model.gate.during = stop
    x = torch.randn(2, 8)
    seen = weakref.ref(x)
    try:
        model(x)
    except KeyboardInterrupt as error:
        error.__traceback__ = None
    del x
    torch.ones(1) + 1  # the first function of torch afterwards ends the call's mode
    torch.tanh(TWO)
    gc.collect()
    assert seen() is None


def test_a_revert_during_the_forward_it_reverts() -> None:
    model, fix = bounded()
    model.gate.during = fix.revert
    x = torch.randn(2, 8)
    model(x)
    assert not fix.status().edits
    assert torch.equal(1 + torch.tanh(TWO), STOCK)
    model.gate.during = None
    nn.init.constant_(model.gate.b.bias, 100.0)
    assert torch.equal(model(torch.ones(1, 8)), torch.full((1, 8), 2.0))


class HandWrittenGelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def test_a_gelu_put_inside_after_the_patch_is_seen_and_left_alone_again() -> None:
    model, fix = bounded()
    nn.init.normal_(model.gate.b.weight)
    x = torch.randn(2, 8)
    model.gate.a = nn.Sequential(model.gate.a, HandWrittenGelu())
    factor = hfpatch.numerics.modulation.delta(model.gate.b(model.gate.a(x)), 0.5, 1.5) + 1
    (edit,) = fix.status().edits
    assert edit.state.word == "gone"
    assert "a new HandWrittenGelu" in edit.state.now
    hfpatch.apply(model, only="sigmoid-modulation", added_modules=["gate"], verbose=False)
    assert torch.allclose(model(x), x * factor)
    hfpatch.revert(model)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_a_gelu_inside_an_interrupted_call_is_its_own() -> None:
    """The hooks that hide another module's 1 + tanh leave no mode either."""
    model: Any = COMPOSITES["modulated"](tiny_model("gpt2"))
    fix = hfpatch.apply(model, verbose=False)
    assert fix.edits

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.transformer.h[0].mlp.act.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(input_ids=torch.arange(8)[None])
    handle.remove()
    x = torch.tensor(2.0)
    y = x.add_(1)
    assert y is x
    assert torch.equal(1 + torch.tanh(TWO), STOCK)
