"""`hfpatch.check(batch=)`: adapters that evaluation leaves out, adapters that are 0, packed documents, positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, RwkvConfig, RwkvForCausalLM

import hfpatch
from hfpatch.testing import example_inputs, tiny_model
from tests.fingerprint import fingerprint
from tests.test_check import one

IDS = torch.arange(10, 26).reshape(2, 8)
SAYS = "that evaluation computes with the"


class Speech(nn.Module):
    """An encoder of torch's own layers in front of a language model."""

    def __init__(self, *, batch_first: bool = True, activation: str = "relu", whole: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=batch_first, dropout=0.1, activation=activation)
            for _ in range(2)
        ]
        self.encoder: Any = nn.TransformerEncoder(layers[0], 2) if whole else nn.Sequential(*layers)
        config: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        self.llm = LlamaForCausalLM(LlamaConfig(**config, vocab_size=64))
        self.config = self.llm.config

    def forward(self, feats: torch.Tensor, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        speech = self.encoder(feats)
        text = self.llm.get_input_embeddings()(input_ids)
        if labels is not None:
            labels = torch.cat([torch.full(speech.shape[:2], -100), labels], 1)
        return self.llm(inputs_embeds=torch.cat([speech, text], 1), labels=labels)


def adapted(model: nn.Module, *names: str) -> Any:
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=2, target_modules=list(names)))


def speech_batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    return {"feats": torch.randn(2, 3, 32), "input_ids": IDS, "labels": IDS}


@pytest.mark.parametrize("kwargs", [{}, {"activation": "gelu"}, {"whole": False}], ids=str)
def test_layers_that_evaluation_bypasses(kwargs: dict[str, Any]) -> None:
    model = adapted(Speech(**kwargs), "linear1", "linear2", "q_proj")
    before = fingerprint(model)
    hazard = one(hfpatch.check(model, {}, batch=speech_batch()), "adapter-not-in-eval")
    assert hazard.certain
    assert "4 of 6 adapted layers" in hazard.reason
    assert "linear1" in hazard.reason and "q_proj" not in hazard.reason
    assert "TransformerEncoderLayer" in hazard.change
    assert fingerprint(model) == before
    assert "hfpatch.apply(model, only='encoder-fast-path')" in hazard.change
    hfpatch.apply(model, only="encoder-fast-path", verbose=False)
    cured = hfpatch.check(model, {}, batch=speech_batch())
    assert "adapter-not-in-eval" not in cured.ids, str(cured)
    assert any(line.startswith(SAYS) for line in cured.measured), cured.measured


def test_layers_that_evaluation_calls() -> None:
    """torch's layers with `batch_first=False` are called in evaluation as well."""
    found = hfpatch.check(adapted(Speech(batch_first=False), "linear1", "q_proj"), {}, batch=speech_batch())
    assert "adapter-not-in-eval" not in found.ids, str(found)
    assert any(line.startswith(SAYS) for line in found.measured), found.measured


def test_weights_that_evaluation_divides_under_an_adapter() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "attention_hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
    }
    config = RwkvConfig(**sizes, vocab_size=64, rescale_every=2, context_length=32)
    model = adapted(RwkvForCausalLM(config), "output", "value")
    before = fingerprint(model)
    hazard = one(hfpatch.check(model, {}, batch={"input_ids": IDS, "labels": IDS}), "adapter-differs-in-eval")
    assert "rescale_every" in hazard.change
    assert fingerprint(model) == before, "RWKV divides its weights in evaluation; they are as they were"
    config.rescale_every = 0
    fixed = adapted(RwkvForCausalLM(config), "output", "value")
    assert "adapter-differs-in-eval" not in hfpatch.check(fixed, {}, batch={"input_ids": IDS, "labels": IDS}).ids


class Noisy(nn.Module):
    """A model that computes something else in evaluation without any adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.out(self.norm(x))
        return {"loss": y.square().mean(), "logits": y}


def test_a_model_that_differs_without_adapters_is_not_the_adapters_fault() -> None:
    torch.manual_seed(0)
    found = hfpatch.check(adapted(Noisy(), "out"), {}, batch={"x": torch.randn(16, 8) * 3 + 1})
    assert not {"adapter-not-in-eval", "adapter-differs-in-eval"} & set(found.ids)
    assert any("the model itself computes something else" in line for line in found.measured), found.measured


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5", "whisper", "qwen2_moe"])
def test_a_healthy_adapter(architecture: str) -> None:
    model = tiny_model(architecture)
    batch = example_inputs(model)
    found = hfpatch.check(get_peft_model(model, hfpatch.lora_config(model, r=2, verbose=False)), {}, batch=batch)
    assert not {i for i in found.ids if i.startswith("adapter-")}, str(found)
    assert any(line.startswith(SAYS) for line in found.measured), found.measured


def test_dropout_is_no_difference() -> None:
    model = tiny_model("gpt2", resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5)
    torch.manual_seed(0)
    peft = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.5))
    found = hfpatch.check(peft, {}, batch={"input_ids": IDS, "labels": IDS})
    assert not {i for i in found.ids if i.startswith("adapter-")}, str(found)


def test_an_adapter_of_which_nothing_was_loaded() -> None:
    model = adapted(tiny_model("llama"), "q_proj")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    hazard = one(hfpatch.check(model, batch={"input_ids": IDS, "labels": IDS}), "adapter-changes-nothing")
    assert hazard.certain
    assert "in 4 of 4 adapted layers" in hazard.reason
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name and ".0." not in name:
                parameter.normal_()
    part = one(hfpatch.check(model, batch={"input_ids": IDS, "labels": IDS}), "adapter-changes-nothing")
    assert not part.certain
    assert "in 1 of 4" in part.reason


def packed(architecture: str, *, rows: int = 1, **overrides: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    documents = [{"input_ids": torch.randint(5, 50, (n,)).tolist()} for n in (7, 6)]
    made = DataCollatorWithFlattening(return_tensors="pt")(documents)
    batch = {k: v.repeat(rows, 1) for k, v in made.items() if isinstance(v, torch.Tensor)}
    model = tiny_model(architecture, task="causal", **overrides)
    return adapted(model, *(("q_proj",) if architecture not in ("bloom", "roberta") else ("dense",))), batch


def test_packed_documents_that_read_each_other() -> None:
    model, batch = packed("llama")
    hazard = one(hfpatch.check(model, {"use_cache": True}, batch=batch), "documents-leak")
    assert hazard.certain
    assert "use_cache = False" in hazard.change
    assert "tried" in hazard.change
    apart = hfpatch.check(model, {"use_cache": False}, batch=batch)
    assert "documents-leak" not in apart.ids, str(apart)
    assert any("packed documents are kept apart" in line for line in apart.measured)


def test_packed_documents_in_a_model_that_never_keeps_them_apart() -> None:
    model, batch = packed("bloom")
    hazard = one(hfpatch.check(model, {}, batch=batch), "documents-leak")
    assert "padded" in hazard.change
    assert "not tried" in hazard.change


def test_positions_that_begin_elsewhere() -> None:
    model, batch = packed("roberta", is_decoder=True)
    assert one(hfpatch.check(model, {}, batch=batch), "positions-offset").certain
    model, batch = packed("llama")
    found = hfpatch.check(model, {}, batch=batch)
    assert "positions-offset" not in found.ids
    assert any("positions begin where" in line for line in found.measured)


def test_padding_is_no_document() -> None:
    model, _ = packed("llama")
    ids = torch.tensor([[0, 0, 0, 7, 8, 9, 10, 11]])
    mask = (ids != 0).long()
    positions = (mask.cumsum(1) - 1).clamp(0)
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": ids}
    assert "documents-leak" not in hfpatch.check(model, {}, batch=batch).ids


SAVED = {"modules_to_save": ["embed_tokens"]}


@pytest.mark.parametrize(
    ("kwargs", "apart"),
    [
        ({}, False),
        (SAVED, True),
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, True),
        ({**SAVED, "ensure_weight_tying": True}, False),
        ({"trainable_token_indices": [3]}, False),
    ],
    ids=str,
)
def test_a_head_that_is_tied_no_more(kwargs: dict[str, Any], apart: bool) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    peft = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], **kwargs))
    row = next(h for h in hfpatch.inspect(peft).heads)
    assert row.tied is not apart
    assert bool(row.apart) is apart
    found = hfpatch.check(peft)
    assert ("tied-no-more" in found.ids) is apart, str(found)
    batch = {"input_ids": IDS, "labels": IDS}
    optimizer = torch.optim.SGD([p for p in peft.parameters() if p.requires_grad], lr=0.5)
    peft(**batch).loss.backward()
    optimizer.step()
    ids = torch.arange(64)
    embedded: Any = hfpatch.embed_tokens(peft)(ids)
    identity = peft.get_output_embeddings()(torch.eye(32)).T
    assert bool((embedded - identity).abs().max() > 1e-4) is apart, "what a step does to the two"


def test_inspect_says_that_an_adapter_is_zero() -> None:
    model = adapted(tiny_model("llama"), "q_proj", "embed_tokens")
    (row,) = hfpatch.inspect(model).adapters
    assert (row.layers, row.zero) == (5, 5)
    assert "it changes nothing so far" in " ".join(str(hfpatch.inspect(model)).split())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                parameter.normal_()
    (row,) = hfpatch.inspect(model).adapters
    assert row.zero == 0
    assert "changes nothing" not in " ".join(str(hfpatch.inspect(model)).split())
