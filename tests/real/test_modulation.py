"""SmolLM2 135M, the real weights, modulated in each of its thirty layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hfpatch
from hfpatch.nn import ModulationAdapter
from hfpatch.patching.kinds.one_plus_tanh import Bounded
from tests.conftest import load_script

pytestmark = pytest.mark.real

TOKENS, STEPS = 64, 10


@pytest.fixture(scope="module")
def example() -> Any:
    return load_script("examples/modulated_smollm.py")


@pytest.fixture
def ids(smollm_tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    return smollm_tokens["input_ids"][:, :TOKENS]


def test_untrained_modulations_are_bounded_without_a_bit_of_difference(
    example: Any, smollm_dir: Path, ids: torch.Tensor
) -> None:
    model = example.build(str(smollm_dir)).eval()
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


def test_the_example_learns_only_after(example: Any, smollm_dir: Path, ids: torch.Tensor) -> None:
    before = example.train(example.build(str(smollm_dir)), ids, STEPS)
    model = example.build(str(smollm_dir))
    hfpatch.apply(model, verbose=False)
    after = example.train(model, ids, STEPS)
    print(f"\nbefore {[round(x, 2) for x in before]}\nafter  {[round(x, 2) for x in after]}")
    assert after[0] == before[0]
    assert after[-1] < after[0] / 2
    assert min(before[-3:]) > before[0]


def test_the_adapter_for_new_code_learns(example: Any, smollm_dir: Path, ids: torch.Tensor) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm_dir, dtype=torch.float32).requires_grad_(requires_grad=False)
    with torch.no_grad():
        stock = model(input_ids=ids).logits
        made = ModulationAdapter.attach(model)
        near = model(input_ids=ids).logits
    assert ((near - stock).norm() / stock.norm()).item() < 5e-3
    assert "30 modulation adapters, each factor 0.5 to 1.5" in str(made)
    losses = example.train(model.train(), ids, STEPS)
    print(f"\n{[round(x, 2) for x in losses]}")
    assert losses[-1] < losses[0] / 2
