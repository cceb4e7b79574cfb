"""Case 18, for new code: the bounded factor against its definition in float64, and the adapter in a model's life."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

from hfpatch.errors import InputError
from hfpatch.nn import BoundedModulation, ModulationAdapter
from hfpatch.numerics.modulation import delta, modulation, product
from tests.test_modulation import ids_of

BOUNDS = [(0.5, 1.5), (0.25, 3.0), (0.9, 1.01), (0.0, 2.0), (-0.5, 1.2)]
DTYPES = [(torch.float64, 1e-15), (torch.float32, 4e-7), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]


def definition(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """low + (high - low) * sigmoid(x + shift), in float64."""
    shift = torch.logit(torch.tensor((1 - low) / (high - low), dtype=torch.float64))
    return low + (high - low) * torch.sigmoid(x.double() + shift)


@pytest.mark.parametrize(("low", "high"), BOUNDS)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_it_is_the_shifted_sigmoid(low: float, high: float, dtype: torch.dtype, tolerance: float) -> None:
    x = torch.cat([torch.linspace(-20, 20, 801), torch.tensor([0.0, -0.0, 1e-4, 60000.0, -60000.0, float("inf")])])
    x = x.to(dtype)
    got = modulation(x, low, high)
    assert got.dtype == dtype
    scale = max(1.0, abs(high), abs(low))
    assert (got.double() - definition(x, low, high)).abs().max() <= tolerance * scale
    assert torch.all(modulation(torch.zeros(3, dtype=dtype), low, high) == 1)
    assert torch.all((got.double() >= low - tolerance) & (got.double() <= high + tolerance * scale))


@pytest.mark.parametrize(("low", "high"), BOUNDS)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_gradients(low: float, high: float, dtype: torch.dtype, tolerance: float) -> None:
    x = torch.linspace(-8, 8, 161).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    (got,) = torch.autograd.grad(modulation(x, low, high).sum(), x)
    (want,) = torch.autograd.grad(definition(wide, low, high).sum(), wide)
    assert (got.double() - want).abs().max() <= 4 * tolerance
    zero = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(modulation(zero, low, high).sum(), zero)
    assert slope.item() == pytest.approx((1 - low) * (high - 1) / (high - low), rel=1e-12)


def test_small_arguments_keep_their_digits_in_half_precision() -> None:
    """x + shift would round 1e-3 away beside a shift of 2.2 in bfloat16; delta does not."""
    x = torch.tensor([1e-3, -1e-3, 3e-4], dtype=torch.bfloat16)
    want = definition(x, 0.1, 1.1) - 1
    assert torch.allclose(delta(x, 0.1, 1.1).double(), want, rtol=2e-2)


@pytest.mark.parametrize(("low", "high"), [(1.0, 2.0), (0.5, 1.0), (2, 3), (float("-inf"), 2), (None, 2)])
def test_bounds_that_exclude_one(low: Any, high: Any) -> None:
    with pytest.raises(InputError, match="1 must lie strictly between them"):
        BoundedModulation(low, high)
    with pytest.raises(InputError, match="1 must lie strictly between them"):
        ModulationAdapter(8, low=low, high=high)


def test_the_product_of_the_bounds_is_said() -> None:
    assert product(0.5, 1.5, 28) == (
        "over 28 in a row at least 0.5^28 = 3.7e-09 and at most 1.5^28 = 85,223, which passes float16's 65,504"
    )
    assert "passes" not in product(0.5, 1.5, 27)
    assert "inf" in product(0.5, 1.5, 100000)


def test_initialisation_and_the_two_paths() -> None:
    torch.manual_seed(0)
    adapter = ModulationAdapter(512, rank=64)
    assert adapter.a_proj.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert adapter.b_add.weight.std().item() == pytest.approx(0.001, rel=0.02)
    assert not adapter.b_mult.weight.any()
    h = torch.randn(2, 3, 512)
    added = 0.1 * adapter.b_add(adapter.a_proj(h))
    assert torch.equal(adapter(h), h + added)
    assert (added.norm() / h.norm()).item() < 1e-3
    nn.init.normal_(adapter.b_mult.weight)
    x = adapter.b_mult(adapter.a_proj(h))
    assert torch.allclose(adapter(h), h * (0.5 + torch.sigmoid(x)) + added, atol=1e-5)
    safe = ModulationAdapter(512, safe_mode=True)
    assert safe.b_mult is None
    assert torch.equal(safe(h), h + 0.1 * safe.b_add(safe.a_proj(h)))


def test_it_computes_in_its_own_dtype_and_gives_back_the_streams() -> None:
    adapter = ModulationAdapter(8)
    nn.init.normal_(adapter.b_mult.weight)
    h = torch.randn(2, 8).half()
    assert adapter(h).dtype == torch.float16
    assert torch.equal(adapter(h), adapter(h.float()).half())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert adapter(h.float()).dtype == torch.float32


@pytest.mark.parametrize(("width", "rank"), [(0, 4), (8, 0), (8, 2.5)])
def test_sizes_that_cannot_be(width: Any, rank: Any) -> None:
    with pytest.raises(InputError, match="positive integers"):
        ModulationAdapter(width, rank)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3_text", "gemma3"])
def test_attached_to_a_stock_model(architecture: str, tiny: Any) -> None:
    model, ids = tiny(architecture), ids_of()
    stock = model(input_ids=ids).logits
    names = set(model.state_dict())
    made = ModulationAdapter.attach(model, rank=4)
    near = model(input_ids=ids).logits
    assert 0 < (near - stock).abs().max() < 1e-3
    assert set(model.state_dict()) - names == {
        f"{path}.modulation.{name}.weight" for path in made.paths for name in ("a_proj", "b_add", "b_mult")
    }
    assert {id(p) for p in made.parameters()} <= {id(p) for p in model.parameters()}
    assert "4 modulation adapters, each factor 0.5 to 1.5; over 4 in a row at least 0.5^4" in str(made)
    with torch.no_grad():
        for adapter in made.adapters:
            adapter.b_mult.weight.normal_()
    far = model(input_ids=ids).logits
    assert not torch.allclose(far, stock, atol=1e-3)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert torch.equal(other(input_ids=ids).logits, far)


def test_some_layers_only_and_safe_mode(tiny: Any) -> None:
    model = tiny("llama")
    made = ModulationAdapter.attach(model, layers=[0, -1], safe_mode=True)
    assert made.paths == ("model.layers.0", "model.layers.3")
    assert str(made) == "2 modulation adapters, additive path only"
    for wrong, text in (
        ([0], "already has a"),
        ([9], "the model has 4 layers"),
        ([1, 1], "none twice"),
        ([], "at least one"),
    ):
        with pytest.raises(InputError, match=text):
            ModulationAdapter.attach(model, layers=wrong)
    with pytest.raises(InputError, match="want one language model with decoder layers"):
        ModulationAdapter.attach(nn.Linear(2, 2))


def test_saved_and_loaded_again(tiny: Any, tmp_path: Any) -> None:
    model, ids = tiny("llama"), ids_of()
    made = ModulationAdapter.attach(model, rank=4)
    nn.init.normal_(made.adapters[1].b_mult.weight)
    model.save_pretrained(tmp_path)
    again = tiny("llama")
    ModulationAdapter.attach(again, rank=4)
    missing = again.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert not missing.unexpected_keys
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


def losses(model: nn.Module, steps: int = 16) -> list[float]:
    ids = ids_of()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-2)
    out: list[float] = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    return out


@pytest.mark.parametrize("reentrant", [True, False])
def test_trained_under_gradient_checkpointing(reentrant: bool, tiny: Any) -> None:
    found: dict[bool, list[float]] = {}
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = tiny("llama").requires_grad_(requires_grad=False)
        model.train()
        ModulationAdapter.attach(model, rank=4)
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        found[checkpointing] = losses(model)
    assert found[True] == pytest.approx(found[False], rel=1e-5)
    assert found[True][-1] < found[True][0] - 0.1


def test_with_peft_after_it_and_named_in_modules_to_save(tiny: Any) -> None:
    after = get_peft_model(tiny("llama"), LoraConfig(target_modules=["q_proj"]))
    made = ModulationAdapter.attach(after, rank=4)
    assert made.paths[0] == "base_model.model.model.layers.0"
    assert all(p.requires_grad for p in made.parameters())
    first = losses(after)
    assert first[-1] < first[0] - 0.1
    before = tiny("llama")
    ModulationAdapter.attach(before, rank=4)
    kept = get_peft_model(before, LoraConfig(target_modules=["q_proj"], modules_to_save=["modulation"]))
    trained = [n for n, p in kept.named_parameters() if p.requires_grad and "modulation" in n]
    assert len(trained) == 4 * 3
    second = losses(kept)
    assert second[-1] < second[0] - 0.1


def test_compiled_and_generating(tiny: Any) -> None:
    torch._dynamo.reset()
    model, ids = tiny("llama"), ids_of()
    made = ModulationAdapter.attach(model, rank=4)
    nn.init.normal_(made.adapters[0].b_mult.weight)
    want = model(input_ids=ids, use_cache=False).logits
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(input_ids=ids, use_cache=False).logits, want, atol=1e-5)
    torch._dynamo.reset()
    assert model.generate(input_ids=ids[:, :4], max_new_tokens=3, do_sample=False).shape == (2, 7)
