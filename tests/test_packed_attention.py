"""Documents packed into one row: with the patch each has the logits and gradients that it has alone."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorWithFlattening

import hfpatch
from hfpatch.testing import tiny_model
from tests.fingerprint import fingerprint
from tests.sampling import first_quick

ID = "packed-attention"
CACHED = {"use_cache": True}
LENGTHS = (21, 18, 19)
CURED = ("llama", "opt", "gpt_oss", "gemma3_text", "qwen3_moe", "gpt2", "phi3", "deepseek_v3", "afmoe", "xglm")
APART = ("gemma3", "moshi")
REFUSED = {
    "mamba": "takes no position_ids",
    "jamba": "layers with a state",
    "roberta": "positions that the model counts itself",
    "bloom": "takes no position_ids",
}


def documents(lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(5, 60, (n,), generator=draw) for n in lengths]


def packed(parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the collator of transformers makes."""
    made = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": part.tolist()} for part in parts])
    return {key: value for key, value in made.items() if isinstance(value, torch.Tensor)}


def alone(model: Any, parts: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(input_ids=part[None]).logits.float() for part in parts], 1)


def away(model: Any, batch: dict[str, torch.Tensor], want: torch.Tensor) -> float:
    with torch.no_grad():
        found = model(**batch).logits.float()
    return float((found - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", first_quick(CURED, every=3))
def test_each_document_has_the_logits_that_it_has_alone(architecture: str, attention: str) -> None:
    model = tiny_model(architecture, task="causal")
    if attention == "sdpa":
        try:
            model.set_attn_implementation("sdpa")
        except ValueError:
            pytest.skip(f"{architecture} has no sdpa attention")
    parts = documents()
    batch, want, before = packed(parts), alone(model, parts), fingerprint(model)
    assert away(model, batch, want) > 1e-3
    fix = hfpatch.apply(model, only=ID, verbose=False)
    assert away(model, batch, want) < 1e-4
    assert torch.equal(alone(model, parts), want)
    fix.revert()
    assert fingerprint(model) == before
    assert away(model, batch, want) > 1e-3


@pytest.mark.parametrize("architecture", APART)
def test_a_model_that_keeps_them_apart_is_left_alone(architecture: str) -> None:
    model = tiny_model(architecture, task="causal")
    parts = documents()
    assert away(model, packed(parts), alone(model, parts)) < 1e-4
    assert not hfpatch.apply(model, only=ID, verbose=False).edits


@pytest.mark.parametrize("architecture", first_quick(REFUSED))
def test_refused_where_it_would_not_help(architecture: str) -> None:
    model = tiny_model(architecture, task="causal")
    (decision,) = hfpatch.plan(model, only=ID).decisions
    assert decision.decided == "refused"
    assert REFUSED[architecture] in decision.reason


@pytest.mark.parametrize("architecture", ["t5", "qwen2_vl"])
def test_not_for_other_models(architecture: str) -> None:
    (decision,) = hfpatch.plan(tiny_model(architecture), only=ID).decisions
    assert decision.decided == "not needed"


def test_a_bare_apply_does_not_run_it_and_names_it() -> None:
    model = tiny_model("llama")
    (decision,) = (d for d in hfpatch.plan(model).decisions if d.patch == ID)
    assert (decision.decided, decision.effect) == ("opt-in", "changes-function")
    assert 'include=["packed-attention"]' in decision.hint


class TestAdapters:
    def model(self, architecture: str = "llama") -> Any:
        torch.manual_seed(0)
        config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return get_peft_model(tiny_model(architecture, task="causal"), config).eval()  # no dropout

    @pytest.mark.parametrize("first", [True, False], ids=["patch first", "adapter first"])
    @pytest.mark.parametrize("architecture", first_quick(["llama", "opt"]))
    def test_gradients_are_those_of_the_documents(self, architecture: str, first: bool) -> None:
        lora = self.model(architecture)
        base = lora.base_model.model
        parts = documents()
        batch = packed(parts)
        labels = batch["labels"]
        want = self.gradients(lora, [(part[None], label) for part, label in self.split(parts, labels)])
        if first:
            hfpatch.apply(base, only=ID, verbose=False)
        else:
            hfpatch.apply(lora, only=ID, verbose=False)
        lora.zero_grad(set_to_none=True)
        lora(**batch).loss.backward()
        for name, parameter in lora.named_parameters():
            if parameter.grad is not None:
                assert torch.allclose(parameter.grad, want[name], rtol=1e-3, atol=1e-6), name

    @staticmethod
    def split(parts: list[torch.Tensor], labels: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(parts, labels.split([len(p) for p in parts], dim=1), strict=True))

    @staticmethod
    def gradients(model: Any, rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Of the mean over the tokens of all documents, each run alone."""
        model.zero_grad(set_to_none=True)
        counts = [int((labels[:, 1:] != -100).sum()) for _, labels in rows]
        for (ids, labels), count in zip(rows, counts, strict=True):
            (model(input_ids=ids, labels=labels).loss * count / sum(counts)).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


class TestWhatStays:
    def test_rows_of_one_document_padded_rows_and_generation(self) -> None:
        model: Any = tiny_model("llama")
        ids = torch.arange(5, 17)[None]
        mask = torch.tensor([[0] * 4 + [1] * 8])
        padded = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(1)}
        plain = {"input_ids": ids, "position_ids": torch.arange(12)[None]}
        asked: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        with torch.no_grad():
            want = [model(**padded), model(**plain)]
            text = model.generate(ids, **asked)
            hfpatch.apply(model, only=ID, verbose=False)
            found = [model(**padded), model(**plain)]
            assert torch.equal(model.generate(ids, **asked), text)
        for one, other in zip(want, found, strict=True):
            assert torch.equal(one.logits, other.logits)
            assert other.past_key_values is not None

    def test_a_mask_of_ones_and_several_rows(self) -> None:
        model = tiny_model("llama")
        parts = documents((9, 7))
        want = alone(model, parts).expand(2, -1, -1)
        batch = {
            "input_ids": torch.cat(parts)[None].expand(2, -1),
            "position_ids": torch.cat([torch.arange(9), torch.arange(7)])[None],
            "attention_mask": torch.ones(2, 16, dtype=torch.long),
        }
        assert away(model, batch, want) > 1e-3
        hfpatch.apply(model, only=ID, verbose=False)
        assert away(model, batch, want) < 1e-4


@pytest.mark.parametrize("architecture", first_quick(["llama", "opt", "gpt_oss"]))
def test_check_advises_it_and_is_content_with_it(architecture: str) -> None:
    model = tiny_model(architecture, task="causal")
    batch = packed(documents())
    hazard = next(h for h in hfpatch.check(model, CACHED, batch=batch) if h.id == "documents-leak")
    assert hazard.change == 'hfpatch.apply(model, include=["packed-attention"]) (tried on this batch: nothing moves)'
    hfpatch.apply(model, include=ID, verbose=False)
    found = hfpatch.check(model, CACHED, batch=batch)
    assert "documents-leak" not in found.ids
    assert any("packed documents are kept apart" in line for line in found.measured)


def test_check_does_not_advise_it_where_it_does_not_help() -> None:
    model = tiny_model("jamba")
    hazard = next(h for h in hfpatch.check(model, CACHED, batch=packed(documents())) if h.id == "documents-leak")
    assert ID not in hazard.change


def test_copies_and_pickles() -> None:
    model = tiny_model("opt")
    parts = documents()
    batch, want = packed(parts), alone(model, parts)
    hfpatch.apply(model, only=ID, verbose=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert away(other, batch, want) < 1e-4
        hfpatch.revert(other)
        assert away(other, batch, want) > 1e-3
