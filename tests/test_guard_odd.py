"""`hfpatch.Guard` on odd input: one sentence for what cannot be used; an interrupted backward pass leaves nothing."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hfpatch
from hfpatch.errors import InputError

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def guarded(**kwargs: Any) -> tuple[nn.Module, hfpatch.Guard]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, hfpatch.Guard(model, optimizer, verbose=False, **kwargs)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"components": {"a": 1}}, "want globs of parameter names as components="),
        ({"components": {"a": ["0.*", 1]}}, "want globs of parameter names as components="),
        ({"components": {1: "0.*"}}, "want globs of parameter names as components="),
        ({"components": {"a": "nothing.*"}}, r"components: 'nothing\.\*' matches none of 4 parameters"),
        ({"min_scale": -1.0}, "min_scale=-1.0; want 0 or more"),
        ({"check_parameters": -1}, "check_parameters=-1; want 0 or more"),
    ],
    ids=str,
)
def test_arguments(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^guard: {message}"):
        guarded(**words)


@pytest.mark.parametrize("tokens", [-1, -0.5, math.nan])
def test_tokens_below_0(tokens: float) -> None:
    model, guard = guarded()
    with pytest.raises(InputError, match=r"^guard: want a number of tokens or None as tokens="):
        guard.step(model(X).mean(), tokens=tokens)  # pyright: ignore[reportArgumentType]


def test_complex_numbers() -> None:
    model, guard = guarded()
    with pytest.raises(InputError, match=r"^guard: want a real loss; got complex64"):
        guard.step(model(X).mean() * 1j)
    parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    model.register_parameter("wave", parameter)
    with pytest.raises(InputError, match=r"^guard: wave is complex64"):
        hfpatch.Guard(model, torch.optim.SGD(model.parameters()), verbose=False)


@pytest.mark.parametrize("saved", [None, {}, {"steps": 1}, "x", {"norms": [1.0]}], ids=str)
def test_a_state_that_is_none(saved: Any) -> None:
    model, guard = guarded()
    guard.step(model(X).mean())
    before = guard.state_dict()
    with pytest.raises(InputError, match=r"^guard: load_state_dict: want what state_dict\(\) returned"):
        guard.load_state_dict(saved)
    assert guard.state_dict() == before
    guard.load_state_dict(before)
    assert guard.state_dict() == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("steps", [1, 2])
def test_an_interrupted_backward_pass_is_not_added_to_the_next(error: type[BaseException], steps: int) -> None:
    """Some parameters have their gradient by then, others not: such a window is dropped."""
    model, guard = guarded(accumulation_steps=steps)
    twin, plain = copy.deepcopy(model), None
    for _ in range(steps - 1):
        guard.step(model(X).mean())

    def stop(_gradient: torch.Tensor) -> None:
        raise error

    handle = model[0].weight.register_hook(stop)
    with pytest.raises(error):
        guard.step(model(X).mean())
    handle.remove()
    assert all(p.grad is None for p in model.parameters())
    for _ in range(steps):
        outcome = guard.step(model(X).mean())
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    twin(X).mean().backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    plain.step()
    assert outcome.stepped
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_an_optimizer_of_gathered_parameters() -> None:
    """After a forward pass without a backward one, FSDP2 leaves the root's weights whole; steps on those are lost."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with torch.no_grad():
        model(X)
    gathered = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"holds 4 parameters as FSDP2 gathered them .* \(first: 0\.weight\).*reshard"):
        hfpatch.Guard(model, gathered, verbose=False)
    guard = hfpatch.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
    assert guard.step(model(X).square().mean()).facts.kind == "stepped"
