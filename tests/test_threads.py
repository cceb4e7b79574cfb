"""Two threads patch and revert one model at once: each call is whole, and a revert gives back what was there."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hfpatch
from hfpatch.lab.tiny import tiny_model
from tests.fingerprint import HOOKS, fingerprint

ROUNDS = 80
"""Of three calls in each thread."""
ONLY = "fp16-residual-overflow"


class Wrapper(nn.Module):
    def __init__(self, llm: nn.Module) -> None:
        super().__init__()
        self.llm = llm

    def forward(self, **batch: Any) -> Any:
        return self.llm(**batch)


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads change places often."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def calls(given: nn.Module) -> dict[str, Callable[[], Any]]:
    return {
        "apply": lambda: hfpatch.apply(given, only=ONLY, verbose=False),
        "revert": lambda: hfpatch.revert(given),
        "status": lambda: hfpatch.status(given).to_dict(),
        "plan": lambda: hfpatch.plan(given, only=ONLY),
    }


def hooks(model: nn.Module) -> list[tuple[str, str, int]]:
    """How many hooks each module has in each of torch's tables."""
    return [(path, name, len(getattr(m, name))) for path, m in model.named_modules() for name in HOOKS]


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("wrapped", [False, True])
def test_apply_and_revert_from_two_threads(wrapped: bool) -> None:
    model = tiny_model("gemma3_text", num_hidden_layers=2).half()
    other = Wrapper(model) if wrapped else model
    before, bare = fingerprint(model), hooks(model)
    with hfpatch.apply(model, only=ONLY, verbose=False):
        patched = hooks(model)
    assert patched != bare
    found: list[str] = []

    def look() -> None:
        """After each phase, while both threads wait."""
        phase = next(phases)
        if phase == "apply" and hooks(model) != patched:
            found.append("applied by both, hooks are missing or doubled")
        if phase == "revert" and hooks(model) != bare:
            found.append("reverted by both, hooks are left")

    phases = iter(["start", *["apply", "anything", "revert"] * ROUNDS])
    together = threading.Barrier(2, look)

    def work(given: nn.Module, seed: int) -> None:
        chance = random.Random(seed)  # noqa: S311 - repeatable, not secret
        known = calls(given)
        together.wait()
        for phase in ["apply", "anything", "revert"] * ROUNDS:
            try:
                known.get(phase, known[chance.choice(list(known))])()
            except Exception as error:  # noqa: BLE001 - the test reports whatever it is
                found.append(f"{phase}: {type(error).__name__}: {error}")
            together.wait()

    threads = [threading.Thread(target=work, args=pair) for pair in ((model, 0), (other, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not found, f"{len(found)} times, first {found[0]}"
    assert fingerprint(model) == before
    assert not hfpatch.status(other)
    hfpatch.apply(other, only=ONLY, verbose=False)
    assert bool(model(input_ids=torch.arange(6)[None] + 3).logits.isfinite().all())
