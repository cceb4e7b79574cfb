"""Advice of `hfpatch.check(batch=)` was tried: a step under it runs, and each trained parameter has a gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hfpatch
from hfpatch.guarding.checking.measurement import Measurement
from hfpatch.testing import example_inputs, tiny_model
from tests.sampling import slow
from tests.test_check import IDS, kwargs_name, one

BATCH = {"input_ids": IDS, "labels": IDS}
KEY = kwargs_name()
REENTRANT = {KEY: True, f"{KEY}_kwargs": {"use_reentrant": True}}
OTHER = {KEY: True, f"{KEY}_kwargs": {"use_reentrant": False}}


def adapted(architecture: str) -> tuple[Any, dict[str, Any]]:
    model: Any = tiny_model(architecture, task="multimodal")
    inject_adapter_in_model(hfpatch.lora_config(model, r=2, verbose=False), model)
    return model, example_inputs(model)


def real(model: Any, batch: dict[str, Any]) -> list[str]:
    """Run a real step on a copy; return the names of the trained parameters without a gradient."""
    twin = copy.deepcopy(model).train()
    twin(**batch).loss.backward()
    return [n for n, p in twin.named_parameters() if p.requires_grad and p.grad is None]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["kosmos-2", "blip"])
def test_no_advice_that_crashes(architecture: str) -> None:
    """`enable_input_require_grads()` is the usual advice; there it raises, since forward writes in place."""
    model, batch = adapted(architecture)
    usual = copy.deepcopy(model)
    usual.gradient_checkpointing_enable({"use_reentrant": True})
    usual.enable_input_require_grads()
    with pytest.raises(RuntimeError, match="in-place operation"):
        real(usual, batch)
    hazard = one(hfpatch.check(model, REENTRANT, batch=batch), "checkpointing-cuts-off")
    assert "enable_input_require_grads" not in hazard.change
    assert (
        hazard.change
        == 'hfpatch.apply(model, include=["tower-input-grads"]) (tried on this batch: all of them get one)'
    )
    fix = hfpatch.apply(model, include="tower-input-grads", verbose=False)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    assert not real(model, batch)
    fix.revert()
    with pytest.raises(RuntimeError, match="does not require grad"):
        real(model, batch)
    model.gradient_checkpointing_disable()
    assert "use_reentrant" in one(hfpatch.check(adapted(architecture)[0], REENTRANT), "checkpointing-cuts-off").change
    unseen = one(hfpatch.check(adapted(architecture)[0], REENTRANT), "checkpointing-cuts-off").change
    assert "not tried" in unseen
    assert "enable_input_require_grads" not in unseen


class Uneven(LlamaDecoderLayer):
    """Saves another number of tensors when it runs again, which only the reentrant implementation allows."""

    runs = 0

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        output = super().forward(hidden_states, *args, **kwargs)
        return output * 1.0 * torch.ones_like(output) if self.runs % 2 else output


def test_inputs_that_require_gradients_are_tried_where_the_other_kind_raises() -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.__class__ = Uneven
    inject_adapter_in_model(LoraConfig(target_modules=["q_proj"], r=2), model)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.disable_input_require_grads()
    hazard = one(hfpatch.check(model, {}, batch=BATCH), "checkpointing-cuts-off")
    assert hazard.change.startswith("model.enable_input_require_grads() (tried on this batch")
    model.enable_input_require_grads()
    assert not real(model, BATCH)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(RuntimeError):
        real(model, BATCH)


@pytest.mark.parametrize(
    ("architecture", "tensor", "embedding"),
    [
        ("kosmos-2", "inputs_embeds", "text_model.model.embed_tokens"),
        slow("blip", "embeddings", "text_decoder.bert.embeddings.word_embeddings"),
        slow("git", "embeddings", "git.embeddings.word_embeddings"),
        slow("udop", "inputs_embeds", "encoder.embed_tokens"),
    ],
)
def test_a_write_into_an_embedding(architecture: str, tensor: str, embedding: str) -> None:
    model, batch = adapted(architecture)
    fine = hfpatch.check(model, {}, batch=batch)
    assert "inplace-embedding" not in fine.ids, "without that hook the write does no harm"
    assert any("writes in place into the output of " in line and embedding in line for line in fine.measured)
    assert not real(model, batch)
    model.enable_input_require_grads()
    with pytest.raises(RuntimeError, match="in-place operation"):
        real(model, batch)
    found = hfpatch.check(model, {}, batch=batch)
    hazard = one(found, "inplace-embedding")
    assert "step-raises" not in found.ids
    assert f"writes into {tensor}, the output of {embedding}, in place (" in hazard.reason
    assert hazard.change == 'hfpatch.apply(model, include=["clone-embeds"]) (tried on this batch: the step runs)'
    fix = hfpatch.apply(model, include="clone-embeds", verbose=False)
    assert not real(model, batch)
    fix.revert()
    model.disable_input_require_grads()
    assert not real(model, batch)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["git", "udop"])
def test_a_write_into_an_embedding_under_checkpointing(architecture: str) -> None:
    """In a model of text, transformers sets the hook itself when checkpointing is turned on."""
    model, batch = adapted(architecture)
    for args in (REENTRANT, OTHER):
        hazard = one(hfpatch.check(model, args, batch=batch), "inplace-embedding")
        assert hazard.change == 'hfpatch.apply(model, include=["clone-embeds"]) (tried on this batch: the step runs)'
    hfpatch.apply(model, include="clone-embeds", verbose=False)
    for reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        cut = real(model, batch)
        assert not cut or (reentrant and all("image_encoder" in name or "patch" in name for name in cut)), cut


class OwnLeaf(nn.Module):
    """Writes into a parameter, or into embeddings that forward itself makes a leaf."""

    def __init__(self, *, parameter: bool) -> None:
        super().__init__()
        self.llm = tiny_model("llama")
        self.shift = nn.Parameter(torch.zeros(()))
        self.parameter = parameter

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        with torch.no_grad():
            embeds = self.llm.get_input_embeddings()(input_ids)
        if self.parameter:
            self.shift += 1.0
        else:
            embeds.requires_grad_(True)
            embeds += self.shift
        return self.llm(inputs_embeds=embeds, labels=labels)


@pytest.mark.parametrize("parameter", [True, False])
def test_a_leaf_that_no_hook_made(parameter: bool) -> None:
    model = OwnLeaf(parameter=parameter)
    with pytest.raises(RuntimeError, match="in-place operation"):
        real(model, BATCH)
    hazard = hfpatch.check(model, {}, batch=BATCH).hazards[0]
    assert "tried on this batch" not in hazard.change
    assert "disable_input_require_grads" not in hazard.change, "it would not help"
    if parameter:
        assert hazard.id == "step-raises"
    else:
        assert hazard.id == "inplace-embedding"
        assert "writes into embeds, the output of llm.model.embed_tokens, in place (embeds += self.shift)" in (
            hazard.reason
        )
        assert hazard.change == "write into a copy (embeds.clone())"


def test_an_adapter_model_is_called_as_training_calls_it() -> None:
    """PEFT's causal model adds `inputs_embeds=None`, which this forward hands on twice."""
    model = tiny_model("blip", task="multimodal")
    batch = example_inputs(model)
    causal = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["query"], r=2))
    with pytest.raises(TypeError):
        causal(**batch)
    hazard = one(hfpatch.check(causal, {}, batch=batch), "step-raises")
    assert "got multiple values for keyword argument 'inputs_embeds'" in hazard.reason
    assert len(hazard.reason) < 600


def test_virtual_tokens_are_trained() -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_peft_model(tiny_model("llama"), config)
    assert not real(model, BATCH)
    assert not hfpatch.check(model, {}, batch=BATCH), "the prompt is made by PEFT's own forward"


class Counter:
    """Counts the forward and backward passes of a model."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forwards = self.backwards = 0
        forward, grad, backward = model.forward, torch.autograd.grad, torch.Tensor.backward

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.forwards += 1
            return forward(*args, **kwargs)

        def taken(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.backwards += 1
            return grad(outputs, *args, **kwargs)

        def ran(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self.backwards += 1
            backward(tensor, *args, **kwargs)

        model.forward = counted  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setattr(torch.autograd, "grad", taken)
        monkeypatch.setattr(torch.Tensor, "backward", ran)

    @property
    def steps(self) -> float:
        return (self.forwards + 2 * self.backwards) / 3


def dearest() -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """A fresh adapter, part of it cut off by reentrant checkpointing, and a loss that is divided by nothing."""

    class Undivided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = LoraConfig(target_modules=["q_proj"], r=2)
            self.scale = nn.Parameter(torch.ones(()))
            self.llm: Any = get_peft_model(tiny_model("llama"), config).base_model.model
            self.tower: Any = get_peft_model(tiny_model("llama"), config).base_model.model

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> Any:
            table = self.llm.get_input_embeddings().weight.detach()
            embeds = nn.functional.embedding(input_ids, table)  # no hook makes it require a gradient
            seen = self.tower(inputs_embeds=embeds, output_hidden_states=True).hidden_states[-1]
            seen = seen * self.scale
            return {"loss": self.llm(inputs_embeds=seen, labels=labels).loss}

    return Undivided(), {**REENTRANT, "gradient_accumulation_steps": 4}, BATCH


def plain(**kwargs: Any) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    model = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"], r=2))
    return model, {"gradient_accumulation_steps": 4, **kwargs}, BATCH


CASES: dict[str, Any] = {
    "lora": plain,
    "lora-checkpointed": lambda: plain(**REENTRANT),
    "whole": lambda: (tiny_model("llama"), {"gradient_accumulation_steps": 4}, BATCH),
    "dearest": dearest,
    **{f"{a}-{k}": lambda a=a, args=args: (*adapted(a)[:1], args, adapted(a)[1]) for a in ("kosmos-2", "blip", "git")
       for k, args in (("reentrant", REENTRANT), ("other", OTHER), ("none", {}))},
}  # fmt: skip


@pytest.mark.parametrize("case", [case if case in ("lora", "dearest") else slow(case) for case in CASES])
def test_a_check_costs_three_steps_and_a_half_at_most(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, batch = CASES[case]()
    counter = Counter(model, monkeypatch)
    found = hfpatch.check(model, args, batch=batch)
    assert 1 / 3 <= counter.steps <= 3.5, (counter.forwards, counter.backwards, str(found))


def test_what_the_budget_leaves_out_is_said() -> None:
    model, args, batch = dearest()
    found = hfpatch.check(model, args, batch=batch)
    assert "checkpointing-cuts-off" in found.ids, str(found)
    left = [line for line in found.not_looked_at if "3.5 steps" in line]
    assert [line.partition(":")[0] for line in left] == [
        "that evaluation uses the adapters",
        "the loss with another num_items_in_batch",
    ], found.not_looked_at


def test_the_costs_are_those_of_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    from hfpatch.guarding.checking.subject import Subject

    model, args, batch = plain(**REENTRANT)
    counter = Counter(model, monkeypatch)
    step = Measurement(Subject(model, args, None, batch, None), batch)
    assert step.step.backward
    step.run(reentrant=False)
    assert sum(step.costs) == counter.steps == 2
