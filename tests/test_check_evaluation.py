"""`hfpatch.check(batch=)`: adapters that evaluation leaves out, adapters that are 0, packed documents, positions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, RwkvConfig, RwkvForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import hfpatch
from hfpatch.testing import example_inputs, tiny_model
from tests.fingerprint import fingerprint
from tests.sampling import first_quick, slow
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
    assert "hfpatch.apply(model, only='encoder-fast-path') (tried on this batch: outputs are" in hazard.change
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
    assert "hfpatch.apply(model, only='rwkv-rescale') (tried on this batch" in hazard.change
    assert "under 4 adapters" in hazard.reason
    assert fingerprint(model) == before, "RWKV divides its weights in evaluation; they are as they were"
    fix = hfpatch.apply(model, only="rwkv-rescale", verbose=False)
    cured = hfpatch.check(model, {}, batch={"input_ids": IDS, "labels": IDS})
    assert "adapter-differs-in-eval" not in cured.ids, str(cured)
    assert any(line.startswith(SAYS) for line in cured.measured), cured.measured
    fix.revert()
    batch = {"input_ids": IDS, "labels": IDS}
    half = one(hfpatch.check(model.half(), {}, batch=batch), "adapter-differs-in-eval")
    assert "only='rwkv-rescale', batch=batch)" in half.change, "in float16 the patch is refused without a batch"
    assert hfpatch.apply(model, only="rwkv-rescale", batch=batch, verbose=False).edits
    config.rescale_every = 0
    fixed = adapted(RwkvForCausalLM(config), "output", "value")
    assert "adapter-differs-in-eval" not in hfpatch.check(fixed, {}, batch={"input_ids": IDS, "labels": IDS}).ids


class Halved(nn.Linear):
    """A linear map whose weight is half as large in evaluation, under whatever adapter is around it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if self.training else x / 2)


class Doubled(LlamaMLP):
    """Makes up for that: without an adapter on the map evaluation computes what training does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 if self.training else 2)


def test_no_patch_is_named_that_was_not_tried() -> None:
    model: Any = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp.__class__ = Doubled
        layer.mlp.down_proj.__class__ = Halved
    found = hfpatch.check(adapted(model, "q_proj", "down_proj"), {}, batch={"input_ids": IDS, "labels": IDS})
    hazard = one(found, "adapter-differs-in-eval")
    assert "self.training" in hazard.change
    assert "hfpatch.apply" not in hazard.change


def zeroed(architecture: str, at: str, axis: int) -> Any:
    model = tiny_model(architecture)
    weight = model.get_parameter(f"{at}.weight")
    with torch.no_grad():
        weight.index_fill_(axis, torch.tensor([3, 5]), 0)
    return model


ROWS = {
    "linear": ("llama", "model.layers.1.mlp.up_proj", 0, ["up_proj", "q_proj"]),
    "Conv1D": ("gpt2", "transformer.h.1.mlp.c_fc", 1, ["c_attn", "c_fc"]),
    "embedding": ("llama", "model.embed_tokens", 1, ["embed_tokens", "q_proj"]),
}


@pytest.mark.parametrize("kind", ROWS)
def test_dora_over_rows_of_zeros(kind: str) -> None:
    architecture, at, axis, targets = ROWS[kind]
    batch = {"input_ids": IDS, "labels": IDS}
    model = get_peft_model(zeroed(architecture, at, axis), LoraConfig(r=2, target_modules=targets, use_dora=True))
    before = fingerprint(model)
    outputs = model.get_submodule(f"base_model.model.{at}").get_base_layer().weight.shape[axis]
    for found in (hfpatch.check(model, {}, batch=batch), hfpatch.check(model)):
        hazard = one(found, "dora-zero-rows")
        assert hazard.certain
        assert f"1 of {len(dora_layers(model))} layers" in hazard.reason
        assert f"base_model.model.{at}: 2 of {outputs}" in hazard.reason
        assert f"exclude_modules=['{at}']" in hazard.change
    assert "not tried" in hazard.change
    assert fingerprint(model) == before
    assert model(**batch).loss.isnan(), "what is foretold happens"
    tried = one(hfpatch.check(model, {}, batch=batch), "dora-zero-rows").change
    told = float(tried.rpartition("the loss is ")[2].rstrip(")"))
    without = get_peft_model(
        zeroed(architecture, at, axis), LoraConfig(r=2, target_modules=targets, exclude_modules=[at], use_dora=True)
    )
    assert told == pytest.approx(without(**batch).loss.item(), rel=1e-3)  # four digits are shown
    assert "dora-zero-rows" not in hfpatch.check(without, {}, batch=batch).ids


def dora_layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if getattr(m, "lora_magnitude_vector", None)]


def test_rows_that_the_adapter_fills_are_not_zero() -> None:
    model = get_peft_model(
        zeroed("llama", "model.layers.1.mlp.up_proj", 0),
        LoraConfig(r=2, target_modules=["up_proj"], use_dora=True, init_lora_weights=False),
    )
    assert "dora-zero-rows" not in hfpatch.check(model).ids
    plain = get_peft_model(zeroed("llama", "model.layers.1.mlp.up_proj", 0), LoraConfig(target_modules=["up_proj"]))
    assert "dora-zero-rows" not in hfpatch.check(plain).ids


def updated(dtype: torch.dtype, size: float, **words: Any) -> Any:
    model = adapted_by(tiny_model("llama").to(dtype), **words)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=size)
    return model


def adapted_by(model: Any, **words: Any) -> Any:
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], **words))


def kept(model: Any, to: torch.dtype | None = None) -> float:
    """The share of the update that `merge_and_unload` leaves, over whole matrices, in a dtype or as the model is."""
    base = {n: p.detach().double() for n, p in copy.deepcopy(model).unload().named_parameters()}
    exact = dict(copy.deepcopy(model).double().merge_and_unload().named_parameters())
    got = dict(copy.deepcopy(model).to(to).merge_and_unload().named_parameters())
    lost = sum(float((got[n].double() - exact[n]).square().sum()) for n in base)
    return 1 - lost / sum(float((exact[n] - base[n]).square().sum()) for n in base)


@pytest.mark.parametrize(
    ("dtype", "size", "words"),
    [
        (torch.bfloat16, 2e-2, {}),
        (torch.bfloat16, 1e-4, {}),
        slow(torch.float16, 1e-5, {}),
        (torch.bfloat16, 1e-4, {"use_dora": True}),
        slow(torch.bfloat16, 1e-4, {"use_rslora": True}),
    ],
    ids=str,
)
def test_what_a_merge_in_half_precision_keeps(dtype: torch.dtype, size: float, words: dict[str, bool]) -> None:
    model = updated(dtype, size, **words)
    before = fingerprint(model)
    (adapter,) = hfpatch.inspect(model).adapters
    assert fingerprint(model) == before
    assert adapter.merge is not None
    assert adapter.merge.kept == pytest.approx(kept(model), abs=1e-3)
    assert adapter.merge.in_float32 == pytest.approx(kept(model, torch.float32), abs=1e-6)
    assert adapter.merge.in_float32 > 0.9999
    remarks = [r for r in hfpatch.check(model, {}).remarks if "merging it" in r]
    assert bool(remarks) is (adapter.merge.kept < 0.99)
    assert f"keeps {adapter.merge.kept:.1%} of its update" in " ".join(str(hfpatch.inspect(model)).split())


def test_no_merge_is_foretold_of_what_is_not_there() -> None:
    assert [a.merge for a in hfpatch.inspect(updated(torch.float32, 1e-4)).adapters] == [None]
    assert [a.merge for a in hfpatch.inspect(updated(torch.bfloat16, 0.0)).adapters] == [None]
    merged = updated(torch.bfloat16, 1e-4)
    merged.merge_adapter()
    assert [a.merge for a in hfpatch.inspect(merged).adapters] == [None]


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


@pytest.mark.parametrize("architecture", first_quick(["llama", "gpt2", "t5", "whisper", "qwen2_moe"]))
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
    assert hazard.change == 'hfpatch.apply(model, include=["packed-attention"]) (tried on this batch: nothing moves)'
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
