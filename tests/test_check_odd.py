"""`hfpatch.check(batch=)` on odd input: one sentence for what cannot be used, and nothing changed, whatever happens."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import hfpatch
from hfpatch.errors import InputError
from hfpatch.testing import example_inputs, tiny_model
from tests.interrupts import AtOperation
from tests.sampling import first_quick
from tests.test_check import IDS, kwargs_name, one

BATCH = {"input_ids": IDS, "labels": IDS}
KEY = kwargs_name()
REENTRANT = {KEY: True, f"{KEY}_kwargs": {"use_reentrant": True}}


def adapted() -> Any:
    return get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"], r=2))


def state(model: nn.Module) -> dict[str, Any]:
    """All that a check must leave as it was."""
    return {
        "values": {n: t.detach().clone() for n, t in model.state_dict().items()},
        "grads": {n: p.grad for n, p in model.named_parameters()},
        "ids": {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)},
        "modes": [m.training for m in model.modules()],
        "keys": [sorted(m.__dict__) for m in model.modules()],
        "lists": [{n: list(v) for n, v in m.__dict__.items() if isinstance(v, list)} for m in model.modules()],
        "hooks": [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()],
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].copy(),
        "python": random.getstate(),
    }


def same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, value in before.items():
        if name == "values":
            assert all(torch.equal(v, after[name][k]) for k, v in value.items()), name
        elif name in ("torch", "numpy"):
            assert bool((value == after[name]).all()), name
        else:
            assert value == after[name], name


BAD: dict[str, tuple[dict[Any, Any], str]] = {
    "meta": ({"input_ids": IDS.to("meta"), "labels": IDS}, "'input_ids' is on the meta device and has no values"),
    "meta, nested": ({**BATCH, "images": [IDS.to("meta")]}, "'images' is on the meta device"),
    "keys": ({**BATCH, "pixels": IDS}, r"does not take this batch \(input_ids, labels, pixels\)"),
    "keys of an adapter": ({**BATCH, "pixels": IDS}, r"does not take this batch \(input_ids, labels, pixels\)"),
    "no names": ({1: IDS}, r"does not take this batch \(1\)"),
}


class Narrow(nn.Module):
    """Takes two keys only."""

    def __init__(self) -> None:
        super().__init__()
        self.llm = tiny_model("llama")

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.llm(input_ids=input_ids, labels=labels)


@pytest.mark.parametrize("case", BAD)
def test_a_batch_that_cannot_be_used(case: str) -> None:
    batch, words = BAD[case]
    model: Any = Narrow()
    if "adapter" in case:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))
    before = state(model)
    with pytest.raises(InputError, match=f"^check: .*{words}") as raised:
        hfpatch.check(model, {}, batch=batch)
    assert "\n" not in str(raised.value)
    same(before, state(model))


def test_a_batch_that_does_not_fit() -> None:
    model = tiny_model("llama")
    for batch in (
        {"input_ids": IDS, "labels": IDS[:, :5]},
        {"input_ids": IDS + 1000, "labels": IDS},
        {"input_ids": IDS.float(), "labels": IDS},
        {},
    ):
        before = state(model)
        assert one(hfpatch.check(model, {}, batch=batch), "step-raises").certain
        same(before, state(model))


def test_labels_of_no_row() -> None:
    hazard = one(hfpatch.check(tiny_model("llama"), {}, batch={"input_ids": IDS[:0], "labels": IDS[:0]}), "no-labels")
    assert "holds no label" in hazard.reason


def test_a_batch_is_not_written_into() -> None:
    class Writes(Narrow):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            labels[labels == labels[0, 0]] = -100
            return super().forward(input_ids, labels)

    batch = {"input_ids": IDS.clone(), "labels": IDS.clone()}
    assert hfpatch.check(Writes(), {}, batch=batch).measured
    assert torch.equal(batch["labels"], IDS)


def test_nested_tensors_are_moved() -> None:
    class Nested(Narrow):
        def forward(self, text: dict[str, list[torch.Tensor]], labels: torch.Tensor) -> Any:
            return self.llm(input_ids=text["ids"][0], labels=labels)

    ids = IDS.clone()
    found = hfpatch.check(Nested(), {}, batch={"text": {"ids": [ids]}, "labels": IDS})
    assert any("the first loss" in line for line in found.measured)


def test_an_optimizer_over_other_parameters() -> None:
    model = tiny_model("llama")
    other = torch.optim.AdamW(copy.deepcopy(model).parameters())
    before = state(model)
    for batch in (None, BATCH):
        with pytest.raises(InputError, match="AdamW holds 39 parameters, none of them of this LlamaForCausalLM"):
            hfpatch.check(model, {}, optimizer=other, batch=batch)
    same(before, state(model))
    stray = nn.Parameter(torch.ones(2))
    mixed = torch.optim.AdamW([*model.parameters(), stray])
    found = hfpatch.check(model, {}, optimizer=mixed, batch=BATCH)
    assert not found.hazards, str(found)
    assert any("1 parameter of the optimizer is none of the model's" in line for line in found.remarks)


def test_parameters_that_the_optimizer_leaves_out() -> None:
    model = tiny_model("llama")
    found = hfpatch.check(model, {}, optimizer=torch.optim.AdamW(model.lm_head.parameters()), batch=BATCH)
    left = len(list(model.parameters())) - 1
    assert any(line.startswith(f"{left} parameters require gradients and are not in") for line in found.remarks)


def test_everything_frozen() -> None:
    model = tiny_model("llama").requires_grad_(False)
    found = hfpatch.check(model, {}, batch=BATCH)
    assert found.ids == ("nothing-trains",)
    assert any("the first loss" in line for line in found.measured)


def test_a_sharded_model_is_not_run() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = tiny_model("llama")
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    found = hfpatch.check(model, {}, batch=BATCH)
    assert not found.measured
    assert any("sharded by FSDP2, and one rank alone cannot run it" in line for line in found.not_looked_at)


def test_parameters_that_are_split_over_ranks() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = tiny_model("llama")
    head = distribute_tensor(model.lm_head.weight.detach(), init_device_mesh("cpu", (1,)))
    model.lm_head.weight = nn.Parameter(head)
    found = hfpatch.check(model, {}, batch=BATCH)
    assert not found.measured
    assert any("lm_head.weight is a DTensor, split over ranks" in line for line in found.not_looked_at)


class Synced(Narrow):
    """Its norm waits for all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        embeds = self.llm.get_input_embeddings()(input_ids)
        return self.llm(inputs_embeds=self.norm(embeds.flatten(0, 1)).view_as(embeds), labels=labels)


def test_a_norm_that_waits_for_other_ranks() -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    found = hfpatch.check(Synced(), {}, batch=BATCH)
    assert not found.measured
    assert any("norm (SyncBatchNorm) waits for the other ranks" in line for line in found.not_looked_at)


def test_a_lazy_module() -> None:
    class Lazy(Narrow):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.LazyLinear(32)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            embeds = self.llm.get_input_embeddings()(input_ids)
            return self.llm(inputs_embeds=self.head(embeds), labels=labels)

    model = Lazy()
    found = hfpatch.check(model, {}, batch=BATCH)
    assert any("head.weight is made by the first call" in line for line in found.not_looked_at)
    model(**BATCH)
    assert hfpatch.check(model, {}, batch=BATCH).measured


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["DataParallel", "compile"])
def test_wrapped(wrap: Any) -> None:
    model = adapted()
    found = hfpatch.check(wrap(model), {}, batch=BATCH)
    assert not found.hazards, str(found)
    assert any("the gradients of 8 trained" in line for line in found.measured)
    cut = adapted()
    for name, parameter in cut.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    assert one(hfpatch.check(wrap(cut), {}, batch=BATCH), "adapter-half-frozen")


def test_compiled_in_place_runs_uncompiled() -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("compiled")

    model = tiny_model("llama")
    model.compile(backend=refuse)
    assert any("the gradients of" in line for line in hfpatch.check(model, {}, batch=BATCH).measured)


def test_inside_other_regions() -> None:
    model = tiny_model("llama")
    plain = hfpatch.check(model, {}, batch=BATCH)
    for region in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with region:
            assert hfpatch.check(model, {}, batch=BATCH).to_dict() == plain.to_dict(), region
    with torch.inference_mode():
        inside = {k: v.clone() for k, v in BATCH.items()}
    assert hfpatch.check(model, {}, batch=inside).to_dict() == plain.to_dict()


class Restless(nn.Module):
    """Changes all that a forward may change, draws random numbers, and may be interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.llm = tiny_model("llama", attention_dropout=0.1)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(32, 32)
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())
        self.calls, self.losses, self.table = 0, [], {"a": 1}

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> Any:
        self.calls += 1
        self.losses.append(self.calls)
        self.table["b"] = self.calls
        np.random.rand()
        random.random()  # noqa: S311 - it draws a number, which is all
        embeds = self.drop(self.llm.get_input_embeddings()(input_ids))
        embeds = self.norm(self.head(embeds).transpose(1, 2)).transpose(1, 2)
        return self.llm(inputs_embeds=embeds, labels=labels)


def test_a_restless_model_is_put_back() -> None:
    """The runs that ask for the division of the loss too."""
    model = Restless().train()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    for batch in (None, BATCH):
        before = state(model)
        found = hfpatch.check(model, {"gradient_accumulation_steps": 4, **REENTRANT}, batch=batch)
        assert "loss-not-divided" in found.ids
        same(before, state(model))
    assert (model.calls, model.losses, model.table) == (0, [], {"a": 1})


@pytest.mark.parametrize("make", first_quick([Restless, adapted]), ids=["restless", "adapter"])
def test_ctrl_c_at_an_operation_leaves_nothing(make: Any) -> None:
    """Forward, backward, the step with noise and the runs without a graph."""
    args = {"gradient_accumulation_steps": 4, **REENTRANT}
    counter = AtOperation(0)
    model = make()
    with counter:
        hfpatch.check(model, args, batch=BATCH)
    every = -counter.left
    before = state(model)
    raised = 0
    for at in range(1, every, max(every // 20, 1)):
        with pytest.raises(KeyboardInterrupt), AtOperation(at):
            hfpatch.check(model, args, batch=BATCH)
        same(before, state(model))
        raised += 1
    assert raised >= 20


def test_tied_weights_and_two_adapters() -> None:
    tied = tiny_model("llama", tie_word_embeddings=True)
    before = state(tied)
    assert not hfpatch.check(tied, {}, batch=BATCH).hazards
    same(before, state(tied))
    both = adapted()
    both.add_adapter("b", LoraConfig(target_modules=["k_proj"], r=2))
    both.base_model.set_adapter(["default", "b"])
    before = state(both)
    found = hfpatch.check(both, {}, batch=BATCH)
    assert not found.hazards, str(found)
    assert any("the gradients of 16 trained" in line for line in found.measured), found.measured
    same(before, state(both))


def test_a_forward_that_writes_its_own_parameters_is_said() -> None:
    class Clamps(Narrow):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            with torch.no_grad():
                self.llm.lm_head.weight.clamp_(-1e-3, 1e-3)
            return super().forward(input_ids, labels)

    found = hfpatch.check(Clamps(), {}, batch=BATCH)
    assert any(re.match(r"that forward writes into 1 .*llm\.lm_head\.weight", line) for line in found.measured)


def test_a_batch_of_towers() -> None:
    model = tiny_model("llava", task="multimodal")
    batch = example_inputs(model)
    before = state(model)
    found = hfpatch.check(model, {"learning_rate": 1e-3}, batch=batch)
    assert found.measured
    same(before, state(model))


@pytest.mark.parametrize("training", [True, False])
def test_weights_that_a_change_of_mode_scales(training: bool) -> None:
    """RWKV divides weights when it is called in evaluation mode, and multiplies them again in training."""
    model = tiny_model("rwkv", attention_hidden_size=32, rescale_every=1)
    batch = example_inputs(model)
    model.train(training)(**batch)
    before = state(model)
    found = hfpatch.check(model, {"gradient_accumulation_steps": 4}, batch=batch)
    assert any("the gradients of" in line for line in found.measured)
    same(before, state(model))


def test_a_model_that_does_not_run_in_evaluation() -> None:
    """The loss is not divided: that is read from code then, and the step that runs in training is no error."""

    class Trains(Restless):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> Any:
            if not self.training:
                raise RuntimeError("not in evaluation")
            return super().forward(input_ids, labels)

    found = hfpatch.check(Trains(), {"gradient_accumulation_steps": 4}, batch=BATCH)
    assert any("the gradients of" in line for line in found.measured)
    assert not one(found, "loss-not-divided").certain


def test_a_backward_that_runs_another() -> None:
    """Reversible layers find their gradients by a backward pass of their own, which `autograd.grad` does not return."""
    model = tiny_model("reformer")
    batch = example_inputs(model)
    twin = copy.deepcopy(model).train()
    twin(**batch).loss.backward()
    dead = [n for n, p in twin.named_parameters() if p.grad is None]
    before = state(model)
    hazard = one(hfpatch.check(model, {}, batch=batch), "no-gradient")
    assert hazard.reason.startswith(f"{len(dead)} of 54 trained parameters")
    assert len(dead) == 1
    assert dead[0] in hazard.reason
    same(before, state(model))
    adapted = get_peft_model(model, LoraConfig(target_modules=["query"], r=2))
    adapted.enable_input_require_grads()
    twin = copy.deepcopy(adapted).train()
    twin(**batch).loss.backward()
    assert all(p.grad is not None for p in twin.parameters() if p.requires_grad)
    assert "no-gradient" not in hfpatch.check(adapted, {}, batch=batch).ids


def test_advice_under_which_backward_raises_is_none() -> None:
    """Without checkpointing forward runs there, but frozen embeddings leave the loss without a graph."""
    model = tiny_model("reformer")
    batch = example_inputs(model)
    adapted = get_peft_model(model, LoraConfig(target_modules=["query"], r=2))
    with pytest.raises(RuntimeError, match="does not require grad"):
        adapted.train()(**batch).loss.backward()
    hazard = one(hfpatch.check(adapted, REENTRANT, batch=batch), "step-raises")
    assert "does not support activation checkpointing" in hazard.reason
    assert "tried on this batch" not in hazard.change
