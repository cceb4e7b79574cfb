"""`hfpatch.check(batch=)` on LoRA: a half that cannot learn is named, a healthy one is not, nothing is written."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

import hfpatch
from hfpatch.testing import tiny_model
from tests.sampling import slow
from tests.test_check import IDS, kwargs_name, one

BATCH = {"input_ids": IDS, "labels": IDS}
HALVES = ("adapter-cut-off", "adapter-half-frozen", "adapter-not-active", "adapter-stays-zero")


def adapted(**kwargs: Any) -> PeftModel:
    torch.manual_seed(0)
    config = LoraConfig(**{"target_modules": ["q_proj", "down_proj"], "r": 2, **kwargs})
    return get_peft_model(tiny_model("llama"), config)


def halves(model: nn.Module, letter: str) -> list[nn.Parameter]:
    return [p for n, p in model.named_parameters() if f"lora_{letter}" in n or f"lora_embedding_{letter}" in n]


def trained_by(model: nn.Module, steps: int = 3) -> set[str]:
    """Names of the parameters that real steps move."""
    twin = copy.deepcopy(model).train()
    before = {n: p.detach().clone() for n, p in twin.named_parameters()}
    optimizer = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=1.0)
    for _ in range(steps):
        optimizer.zero_grad()
        twin(**BATCH).loss.backward()
        optimizer.step()
    return {n for n, p in twin.named_parameters() if not torch.equal(p, before[n])}


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"use_dora": True},
        slow({"use_rslora": True}),
        slow({"lora_dropout": 0.3}),
        slow({"init_lora_weights": "olora"}),
        slow({"init_lora_weights": "pissa"}),
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"modules_to_save": ["lm_head"]},
    ],
    ids=str,
)
def test_a_healthy_adapter_is_not_named(kwargs: dict[str, Any]) -> None:
    model = adapted(**kwargs)
    found = hfpatch.check(model, {}, batch=BATCH)
    assert not found, str(found)
    assert {n for n, p in model.named_parameters() if p.requires_grad} <= trained_by(model)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_healthy_adapter_under_checkpointing(reentrant: bool) -> None:
    """The layers run again in the backward pass, when `lora_B` must still be the noise."""
    key = kwargs_name()
    found = hfpatch.check(adapted(), {key: True, f"{key}_kwargs": {"use_reentrant": reentrant}}, batch=BATCH)
    assert not found, str(found)
    assert any("lora_B" in line and "with noise in place of" in line for line in found.measured), found.measured


def test_b_is_not_written() -> None:
    model = adapted()
    held = [(p, p.data_ptr(), hfpatch_version(p)) for p in model.parameters()]
    names = {n: id(p) for n, p in model.named_parameters()}
    hfpatch.check(model, {}, batch=BATCH)
    assert {n: id(p) for n, p in model.named_parameters()} == names
    assert all((p.data_ptr(), hfpatch_version(p)) == (at, version) for p, at, version in held)
    assert not any(bool(p.any()) for p in halves(model, "B"))


def hfpatch_version(tensor: torch.Tensor) -> int:
    from hfpatch.compat.autograd import version

    return version(tensor)


def test_a_half_that_is_frozen_beside_a_trained_one() -> None:
    model = adapted()
    for parameter in halves(model, "A")[:3]:
        parameter.requires_grad_(False)
    hazard = one(hfpatch.check(model, {}, batch=BATCH), "adapter-half-frozen")
    assert "3 of 8 adapted layers" in hazard.reason
    assert "lora_A" in hazard.reason
    assert not hazard.certain, "LoRA-FA freezes them on purpose"


def test_a_half_that_stays_zero() -> None:
    model = adapted()
    for parameter in halves(model, "B"):
        parameter.requires_grad_(False)
    assert not trained_by(model), "B is 0 and frozen: A has a gradient of 0 for ever"
    hazard = one(hfpatch.check(model, {}, batch=BATCH), "adapter-stays-zero")
    assert hazard.certain
    both = adapted()
    with torch.no_grad():
        for parameter in halves(both, "A"):
            parameter.zero_()
    assert not trained_by(both)
    found = hfpatch.check(both, {}, batch=BATCH)
    assert one(found, "adapter-stays-zero").certain
    assert "zero-gradient" not in found.ids, "once is enough"


def test_an_adapter_that_is_not_active() -> None:
    model = adapted()
    model.add_adapter("other", LoraConfig(target_modules=["q_proj"], r=2))
    assert not hfpatch.check(model, {}, batch=BATCH)
    for name, parameter in model.named_parameters():
        if ".other." in name:
            parameter.requires_grad_(True)
    assert not any(".other." in n for n in trained_by(model))
    hazard = one(hfpatch.check(model, {}, batch=BATCH), "adapter-not-active")
    assert "'other'" in hazard.reason
    assert "set_adapter" in hazard.change
    model.set_adapter("other")
    assert "adapter-not-active" not in hfpatch.check(model, {}, batch=BATCH).ids


def test_an_optimizer_over_the_adapter_before() -> None:
    model = adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model.add_adapter("other", LoraConfig(target_modules=["q_proj"], r=2))
    model.set_adapter("other")
    hazard = one(hfpatch.check(model, {}, optimizer=optimizer, batch=BATCH), "adapter-not-active")
    assert "'default'" in hazard.reason


def test_a_merged_adapter() -> None:
    model = adapted()
    model.merge_adapter()
    with pytest.raises(RuntimeError, match="does not require grad"):
        model(**BATCH).loss.backward()
    found = hfpatch.check(model, {}, batch=BATCH)
    assert "merged" in one(found, "adapter-not-active").reason
    assert "unmerge_adapter" in one(found, "adapter-not-active").change


class Half(nn.Module):
    """A hand-written adapter, whose lower half may be cut off from the backward pass."""

    def __init__(self, layer: nn.Linear, cut: str) -> None:
        super().__init__()
        self.layer, self.cut = layer.requires_grad_(False), cut
        self.lora_A = nn.Linear(layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.lora_A(x)
        if self.cut == "detached":
            low = low.detach()
        elif self.cut == "rounded":
            low = low.round(decimals=2)
        return self.layer(x) + self.lora_B(low)


@pytest.mark.parametrize("cut", ["detached", "rounded", "no"])
def test_a_lower_half_that_is_cut_off(cut: str) -> None:
    torch.manual_seed(0)
    model = tiny_model("llama").requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Half(layer.self_attn.q_proj, cut)
    moved = {n for n in trained_by(model) if "lora_A" in n}
    found = hfpatch.check(model, {}, batch=BATCH)
    assert bool(moved) == (cut == "no")
    assert ("adapter-cut-off" in found.ids) == (cut != "no"), str(found)
    if cut != "no":
        hazard = one(found, "adapter-cut-off")
        assert "model.layers.*.self_attn.q_proj.lora_A.weight" in hazard.reason
        assert not [i for i in found.ids if i in ("no-gradient", "zero-gradient")]


class Towers(nn.Module):
    """A language model behind a tower whose output may be detached."""

    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LoraConfig(target_modules=["q_proj", "down_proj"], r=2)
        self.llm = get_peft_model(tiny_model("llama"), config)
        self.tower = get_peft_model(tiny_model("llama"), config)
        self.detached = detached

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        seen = self.tower(input_ids, output_hidden_states=True).hidden_states[-1]
        return self.llm(inputs_embeds=seen.detach() if self.detached else seen, labels=labels)


@pytest.mark.parametrize("detached", [True, False])
def test_a_tower_that_is_cut_off(detached: bool) -> None:
    model = Towers(detached=detached)
    found = hfpatch.check(model, {}, batch=BATCH)
    assert ("no-gradient" in found.ids) == detached, str(found)
    assert any("tower." in n for n in trained_by(model)) != detached
    if detached:
        hazard = one(found, "no-gradient")
        assert hazard.reason.startswith("16 of 32 trained parameters")
        assert "tower.base_model.model.model.layers.*.self_attn.q_proj.lora_A" in hazard.reason


@pytest.mark.parametrize("tuner", ["AdaLora", "LoHa", "LoKr", "Vera"])
def test_other_adapters_with_a_part_that_starts_at_0(tuner: str) -> None:
    """Their other parts get a gradient of exactly 0 in the first step, and move from the second on."""
    import peft

    torch.manual_seed(0)
    words: dict[str, Any] = {"target_modules": ["q_proj"], "r": 2}
    if tuner == "AdaLora":
        words = {"target_modules": ["q_proj"], "init_r": 2, "target_r": 1, "total_step": 10}
    model = get_peft_model(tiny_model("llama"), getattr(peft, f"{tuner}Config")(**words))
    trained = {n for n, p in model.named_parameters() if p.requires_grad and "ranknum" not in n}
    twin = copy.deepcopy(model)
    twin(**BATCH).loss.backward()
    assert any(p.grad is not None and not bool(p.grad.any()) for n, p in twin.named_parameters() if n in trained)
    assert trained <= trained_by(model, steps=8)
    found = hfpatch.check(model, {}, batch=BATCH)
    assert not found, str(found)
    assert any("with noise in place of" in line for line in found.measured)


class Gated(nn.Module):
    """A branch behind a gate that starts at 0, which may be frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.llm = tiny_model("llama")
        self.branch = nn.Linear(32, 32)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        embeds = self.llm.get_input_embeddings()(input_ids)
        return self.llm(inputs_embeds=embeds + self.gate.tanh() * self.branch(embeds), labels=labels)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_gate_that_starts_at_0(frozen: bool) -> None:
    model = Gated()
    model.gate.requires_grad_(not frozen)
    assert any("branch" in n for n in trained_by(model)) != frozen
    found = hfpatch.check(model, {}, batch=BATCH)
    assert ("zero-gradient" in found.ids) == frozen, str(found)
    if frozen:
        hazard = one(found, "zero-gradient")
        assert "branch.weight, branch.bias" in hazard.reason
    else:
        assert any("(gate)" in line and "with noise in place of" in line for line in found.measured), found.measured
