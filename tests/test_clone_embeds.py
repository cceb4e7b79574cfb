"""Models that write into their embeddings train behind frozen ones, and are left alone where they write into none."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import nn

import hfpatch
from hfpatch.lab.written import written_embeddings
from hfpatch.model.survey import Survey
from hfpatch.testing import example_inputs, tiny_model
from tests import interrupts, matrix
from tests.fingerprint import fingerprint
from tests.sampling import first_quick, some_quick
from tests.wrapped import WITH_PACKAGES

ID = "clone-embeds"
WRITERS = {
    "git": "git.embeddings.word_embeddings",
    "blip": "text_decoder.bert.embeddings.word_embeddings",
    "kosmos-2": "text_model.model.embed_tokens",
    "udop": "encoder.embed_tokens",
    "voxtral_realtime": "model.language_model.embed_tokens",
    "ctrl": "transformer.w",
    "blt": "model.local_encoder.embed_tokens",
}


def adapted(architecture: str) -> tuple[Any, dict[str, Any]]:
    """A PEFT model whose B is not 0, and a batch; what is drawn at random is drawn anew in each step."""
    model = tiny_model(architecture)
    batch = example_inputs(model)
    torch.manual_seed(1)
    config = hfpatch.lora_config(model, r=2, verbose=False)
    config.task_type = None  # PEFT's causal model hands BLIP an argument that it does not take
    lora = get_peft_model(model, config)
    for name, parameter in lora.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return lora, batch


def step(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, and the gradients of what trains."""
    model.zero_grad(set_to_none=True)
    model.eval()  # no dropout
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def hook(model: Any, path: str) -> None:
    """What the notebooks do."""
    model.get_submodule(path).register_forward_hook(lambda _module, _args, out: out.requires_grad_(True))


HOW: dict[str, Callable[[Any, str], object]] = {
    "transformers": lambda model, _path: model.enable_input_require_grads(),
    "by hand": hook,
}


@pytest.mark.parametrize("how", sorted(HOW))
@pytest.mark.parametrize("first", [True, False], ids=["patch first", "hook first"])
@pytest.mark.parametrize("architecture", first_quick(WRITERS))
def test_it_trains_with_the_patch_only(architecture: str, first: bool, how: str) -> None:
    model, batch = adapted(architecture)
    assert set(written_embeddings(Survey(model)).modules) == {f"base_model.model.{WRITERS[architecture]}"}
    loss, gradients = step(model, batch)
    if not first:
        HOW[how](model.base_model.model, WRITERS[architecture])
        with pytest.raises(RuntimeError, match="in-place operation"):
            step(model, batch)
    before = fingerprint(model)
    fix = hfpatch.apply(model, only=ID, verbose=False)
    if first:
        HOW[how](model.base_model.model, WRITERS[architecture])
    again, found = step(model, batch)
    assert torch.equal(again, loss)
    assert found.keys() == gradients.keys()
    assert all(torch.equal(g, gradients[n]) for n, g in found.items())
    fix.revert()
    if not first:
        model.zero_grad(set_to_none=True)
        assert fingerprint(model) == before
    with pytest.raises(RuntimeError, match="in-place operation"):
        step(model, batch)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "t5", "rwkv"])
def test_a_model_that_writes_into_none_is_left_alone(architecture: str) -> None:
    model = tiny_model(architecture)
    (decision,) = hfpatch.plan(model, only=ID).decisions
    assert (decision.decided, decision.edits) == ("not needed", ())
    model.enable_input_require_grads()
    model.train()(**example_inputs(model)).loss.backward()


def test_nothing_is_copied_without_gradients() -> None:
    model = tiny_model("ctrl")
    hfpatch.apply(model, only=ID, verbose=False)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        embeds = model.transformer.w(ids)
    assert not embeds.requires_grad
    model.requires_grad_(False)
    embeds = model.transformer.w(ids)
    assert not embeds.requires_grad
    model.enable_input_require_grads()
    embeds = model.transformer.w(ids)
    assert embeds.requires_grad
    assert not embeds.is_leaf
    with torch.inference_mode():
        assert torch.equal(model.transformer.w(ids), embeds)


class Joined(nn.Module):
    """A model of the user's own that puts features among the embeddings of a language model, in place or not."""

    def __init__(self, llm: Any, *, in_place: bool) -> None:
        super().__init__()
        self.llm, self.in_place = llm, in_place

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        embeds = self.llm.get_input_embeddings()(input_ids)
        if self.in_place:
            embeds[:, :2] = 0.5
        return self.llm(inputs_embeds=embeds, labels=labels)


class Plain(Joined):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.llm(inputs_embeds=self.llm.get_input_embeddings()(input_ids), labels=labels)


IDS = torch.arange(12).reshape(2, 6)
BATCH = {"input_ids": IDS, "labels": IDS}


class TestCodeOfTheUsersOwn:
    def model(self, cls: type[Joined]) -> Any:
        model = cls(tiny_model("llama"), in_place=True)
        model.llm.requires_grad_(False)
        model.llm.lm_head.requires_grad_(True)
        model.llm.enable_input_require_grads()
        return model

    def test_offered_and_it_helps(self) -> None:
        model = self.model(Joined)
        with pytest.raises(RuntimeError, match="in-place operation"):
            model(**BATCH)
        (decision,) = hfpatch.plan(model, only=ID).decisions
        assert "Joined writes into tensors in place" in decision.reason
        (hazard,) = hfpatch.check(model, {}, batch=BATCH)
        assert hazard.id == "inplace-embedding"
        assert hazard.change.startswith('hfpatch.apply(model, include=["clone-embeds"]) (tried on this batch')
        assert ID not in {d.patch for d in hfpatch.apply(model, verbose=False).plan.decisions if d.decided == "applied"}
        hfpatch.apply(model, include=ID, verbose=False)
        model(**BATCH).loss.backward()
        assert not hfpatch.check(model, {}, batch=BATCH)

    def test_left_alone_where_it_writes_into_nothing(self) -> None:
        assert hfpatch.plan(self.model(Plain), only=ID).decisions[0].decided == "not needed"


class TestLife:
    def test_copies_and_pickles(self) -> None:
        model, batch = adapted("ctrl")
        loss, gradients = step(model, batch)
        hfpatch.apply(model, only=ID, verbose=False)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
            other.base_model.model.enable_input_require_grads()
            again, found = step(other, batch)
            assert torch.equal(again, loss)
            assert all(torch.equal(g, gradients[n]) for n, g in found.items())
            hfpatch.revert(other)
            with pytest.raises(RuntimeError, match="in-place operation"):
                step(other, batch)

    @pytest.mark.slow
    def test_compiled(self) -> None:
        model, batch = adapted("ctrl")
        loss, gradients = step(model, batch)
        hfpatch.apply(model, only=ID, verbose=False)
        model.base_model.model.enable_input_require_grads()
        torch._dynamo.reset()
        again, found = step(torch.compile(model, backend="eager"), batch)
        assert torch.allclose(again, loss)
        assert len(found) == len(gradients)

    def test_before_the_adapters(self) -> None:
        model = tiny_model("git")
        batch = example_inputs(model)
        hfpatch.apply(model, only=ID, verbose=False)
        lora = get_peft_model(model, hfpatch.lora_config(model, r=2, verbose=False))
        model.gradient_checkpointing_enable({"use_reentrant": True})
        lora.train()(**batch).loss.backward()
        hfpatch.revert(lora)
        with pytest.raises(RuntimeError, match="in-place operation"):
            lora(**batch)


def test_a_plan_in_a_context_without_values_is_not_remembered() -> None:
    from hfpatch.lab.written import _written

    _written.cache_clear()
    model = tiny_model("ctrl")
    with torch.device("meta"), torch.inference_mode():
        assert hfpatch.plan(model, only=ID).edits
    assert hfpatch.plan(model, only=ID).edits


WRAPPED = [
    ("copy", *place[1:])
    for place in matrix.ALL
    if place[0] == "hook" and "checkpointing" not in place[1] and place[1] not in WITH_PACKAGES
]
"""docs/state.md has a column for hooks: this edit is one. The class that is tried here supports no checkpointing."""


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch) -> None:
    made = interrupts.Subject(lambda: tiny_model("ctrl", num_hidden_layers=1), ID)
    monkeypatch.setitem(interrupts.SUBJECTS, "copy", made)


@pytest.mark.usefixtures("subject")
@pytest.mark.parametrize("place", some_quick(WRAPPED, every=9), ids=" - ".join)
def test_in_every_wrapper_as_the_other_hooks(place: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    if place[1].startswith("torch.compile"):  # CTRL is compiled in so many graphs that it takes three times as long
        git = interrupts.Subject(lambda: tiny_model("git", num_hidden_layers=1), ID)
        monkeypatch.setitem(interrupts.SUBJECTS, "copy", git)
    cell = matrix.run(*place)
    assert cell.outcome == matrix.documented()["hook", *place[1:]] != "FAILS", cell


@pytest.mark.slow
@pytest.mark.usefixtures("subject")
def test_interrupted_at_every_seventh_line() -> None:
    ran = list(interrupts.trials("copy", every=7, first=1))
    assert len(ran) > 10
    assert not [trial for trial in ran if trial[1]]
