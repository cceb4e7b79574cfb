"""SmolLM2 135M, the real weights, modulated in each of its thirty layers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import hfpatch
from hfpatch.nn import ModulationAdapter
from hfpatch.patching.kinds.one_plus_tanh import Bounded
from tests.conftest import load_script

pytestmark = pytest.mark.real

STEPS = 6


@pytest.fixture(scope="module")
def example() -> Any:
    return load_script("examples/modulated_smollm.py")


@pytest.fixture(scope="module")
def llm(example: Any, smollm_dir: Path) -> Any:
    found = example.language_model(str(smollm_dir), "--llm", "llama")
    assert found.real
    return found


@pytest.fixture(scope="module")
def ids(llm: Any) -> torch.Tensor:
    return llm.ids(tokens=16)


@pytest.mark.need(
    "1 + tanh(x), which touches 0, becomes a sigmoid",
    "one call",
    "`hfpatch.apply(model)` (`sigmoid-modulation`): between 0.5 and 1.5, exactly 1 at 0",
)
def test_untrained_modulations_are_bounded_without_a_bit_of_difference(
    example: Any, llm: Any, ids: torch.Tensor
) -> None:
    model = example.student(llm.model, "published", every=0).eval()
    with torch.no_grad():
        stock = model(input_ids=ids).logits
        fix = hfpatch.apply(model, verbose=False)
        (decision,) = (d for d in fix.plan.of("applied") if d.patch == "sigmoid-modulation")
        assert (decision.effect, len(decision.edits)) == ("prepares", 30)
        assert "at most 1.5^30 = 191,751, which passes float16's 65,504" in decision.reason
        assert {e.after for e in decision.edits} == {Bounded(0.5, 1.5)}
        assert torch.equal(model(input_ids=ids).logits, stock)
        # every vector at -40: a factor of 0 becomes 0.5
        layer = model.model.layers[3].modulation
        layer.a_proj.weight.fill_(1.0)
        layer.b_mult.weight.fill_(-40.0)
        h = torch.full((1, 2, 576), 0.1)
        assert torch.allclose(layer(h), 0.5 * h)
        fix.revert()
        assert not layer(h).any()


@pytest.mark.need(
    "`safe_mode`: the additive path alone",
    "one call",
    "`hfpatch.nn.ModulationAdapter(width, safe_mode=True)`",
)
def test_only_bounded_students_learn(example: Any, llm: Any, ids: torch.Tensor) -> None:
    runs = {kind: example.train(example.student(llm.model, kind), llm.model, ids, STEPS) for kind in example.KINDS}
    for kind, run in runs.items():
        print(f"\n{kind}: {[round(x, 3) for x in run.losses]}, {run.nll:.2f} nats a token")
    assert runs["published"].losses[0] == runs["patched"].losses[0]
    for kind in ("patched", "adapter", "safe"):
        assert runs[kind].losses[-1] < 0.95 * runs[kind].losses[0], kind
    assert runs["published"].losses[-1] > 1.5 * runs["patched"].losses[-1]


def test_attached_adapters_for_new_code_begin_at_the_model(llm: Any, ids: torch.Tensor) -> None:
    model = copy.deepcopy(llm.model)
    with torch.no_grad():
        stock = model(input_ids=ids).logits
        made = ModulationAdapter.attach(model)
        near = model(input_ids=ids).logits
    assert ((near - stock).norm() / stock.norm()).item() < 5e-3
    assert "30 modulation adapters, each factor 0.5 to 1.5" in str(made)
