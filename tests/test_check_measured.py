"""`hfpatch.check(batch=)`: what is said was measured, is so in a real step, and leaves nothing behind."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Trainer

import hfpatch
from hfpatch.errors import InputError
from hfpatch.testing import SpeechLLM, example_inputs, tiny_model
from tests.test_check import IDS, arguments, kwargs_name, loaded_in, one

BATCH = {"input_ids": IDS, "labels": IDS}


def test_the_first_loss() -> None:
    model = tiny_model("llama")
    healthy = hfpatch.check(model, {}, batch=BATCH)
    assert not healthy
    assert healthy.measured[0].startswith("the first loss, 4.")
    masked = {**BATCH, "labels": torch.full_like(IDS, -100)}
    assert model(**masked).loss.isnan()
    assert hfpatch.check(model, {}, batch=masked).ids[0] == "no-labels"
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = math.nan
    broken = one(hfpatch.check(model, {}, batch=BATCH), "loss-not-finite")
    assert broken.certain
    assert "on this batch is nan" in broken.reason


def test_a_loss_like_a_guess_is_said_of_a_checkpoint_only(tmp_path: Path) -> None:
    model = tiny_model("llama")
    assert not hfpatch.check(model, {}, batch=BATCH), "it was never trained"
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert not one(hfpatch.check(loaded, {}, batch=BATCH), "loss-like-a-guess").certain
    optimizer = torch.optim.AdamW(loaded.parameters(), lr=1e-2)
    for _ in range(20):
        loaded(**BATCH).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not hfpatch.check(loaded, {}, batch=BATCH)


class HandCast(nn.Module):
    """A float32 projector in front of a float16 language model."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 32)
        self.llm = loaded_in(tiny_model("llama"), torch.float16)

    def forward(self, audio: torch.Tensor, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        embeds = torch.cat([self.proj(audio), self.llm.get_input_embeddings()(input_ids)], 1)
        return self.llm(inputs_embeds=embeds, labels=labels)


def test_a_forward_that_raises_names_module_and_dtypes() -> None:
    batch = {"audio": torch.randn(2, 3, 8), "input_ids": IDS, "labels": torch.cat([IDS[:, :3], IDS], 1)}
    model = HandCast()
    with pytest.raises(RuntimeError):
        model(**batch)
    found = hfpatch.check(model, {}, batch=batch)
    hazard = one(found, "step-raises")
    assert found.ids[0] == "step-raises", "the worst comes first"
    assert "llm.model.layers.0.self_attn.q_proj (Linear)" in hazard.reason
    assert "input float32 (2, 15, 32)" in hazard.reason
    assert "its weight float16" in hazard.reason
    assert "to float16" in hazard.change
    assert any("the step raised" in line for line in found.not_looked_at)


@pytest.mark.parametrize(("rate", "lost"), [(1e-6, True), (1e-3, False)])
@pytest.mark.parametrize("given", ["optimizer", "arguments"])
def test_steps_that_bfloat16_rounds_away(rate: float, lost: bool, given: str) -> None:
    model = loaded_in(tiny_model("llama"), torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    kwargs: dict[str, Any] = {"optimizer": optimizer} if given == "optimizer" else {}
    found = hfpatch.check(model, {"learning_rate": rate, "optim": "adamw_torch"}, batch=BATCH, **kwargs)
    before = [p.detach().clone() for p in model.parameters()]
    model(**BATCH).loss.backward()
    has = [p.grad != 0 for p in model.parameters()]
    optimizer.step()
    moved = sum(int(((p != b) & h).sum()) for p, b, h in zip(model.parameters(), before, has, strict=True))
    share = moved / sum(int(h.sum()) for h in has)
    assert ("steps-lost" in found.ids) == lost == (share < 0.5)
    assert any(f"{share:.1%}" in line for line in found.measured), (share, found.measured)
    assert not optimizer.state_dict()["state"] or optimizer.state[model.lm_head.weight]["step"] == 1, (
        "its own step only"
    )


def test_float32_weights_lose_no_steps() -> None:
    assert not hfpatch.check(tiny_model("llama"), {"learning_rate": 1e-6}, batch=BATCH)


def test_a_schedule_that_begins_at_0_is_judged_at_its_highest() -> None:
    model = loaded_in(tiny_model("llama"), torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 10, 1.0))
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert not hfpatch.check(model, {}, optimizer=optimizer, batch=BATCH)


def test_sums_that_bfloat16_rounds_away() -> None:
    model = loaded_in(tiny_model("llama"), torch.bfloat16)
    args = {"learning_rate": 1e-2, "gradient_accumulation_steps": 512}
    hazard = one(hfpatch.check(model, args, batch=BATCH), "accumulation-rounds")
    weight = model.lm_head.weight
    model(**BATCH).loss.backward()
    part = weight.grad.clone() / 512
    total = torch.zeros_like(part)
    for _ in range(512):
        total += part
    assert (total.float() - part.float() * 512).norm() / (part.float() * 512).norm() > 0.05
    assert "512 times in bfloat16" in hazard.reason
    assert (
        "accumulation-rounds" not in hfpatch.check(model, {**args, "gradient_accumulation_steps": 8}, batch=BATCH).ids
    )


@pytest.mark.parametrize("cast", ["half", "bfloat16", "to"])
def test_buffers_that_a_cast_rounded(cast: str, tmp_path: Path) -> None:
    model = tiny_model("llama", head_dim=16)
    whole = getattr(copy.deepcopy(model), cast)(*([torch.bfloat16] if cast == "to" else []))
    hazard = one(hfpatch.check(whole), "buffers-cast")
    assert "model.rotary_emb.inv_freq" in hazard.reason
    model.save_pretrained(tmp_path)
    assert not hfpatch.check(type(model).from_pretrained(tmp_path, dtype=torch.bfloat16))


@pytest.mark.parametrize("architecture", ["gemma3_text", "gemma2", "m2m_100", "qwen3", "gptj"])
def test_what_from_pretrained_rounds_itself_is_no_hazard(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    model.save_pretrained(tmp_path)
    assert "buffers-cast" not in hfpatch.check(type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)).ids


def test_what_a_full_evaluation_leaves_behind(tmp_path: Path) -> None:
    model = tiny_model("llama")
    args = arguments(tmp_path, bf16_full_eval=True)
    hazard = one(hfpatch.check(model, args), "full-eval-stays")
    assert "(model.embed_tokens.weight first)" in hazard.reason
    rows: Any = [{"input_ids": row, "labels": row} for row in IDS]
    Trainer(model=model, args=args, eval_dataset=rows).evaluate()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}, "nothing casts it back"
    assert model.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    assert "full-eval-stays" not in hfpatch.check(tiny_model("llama"), arguments(tmp_path)).ids


class Unused(nn.Module):
    """A head whose output nothing uses, and a tower that only some batches reach."""

    def __init__(self) -> None:
        super().__init__()
        self.llm = tiny_model("llama")
        self.head = nn.Linear(32, 3)
        self.tower = nn.Linear(4, 32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, features: torch.Tensor | None = None) -> Any:
        embeds = self.llm.get_input_embeddings()(input_ids)
        self.head(embeds)
        if features is not None:
            embeds = embeds + self.tower(features)
        return self.llm(inputs_embeds=embeds, labels=labels)


def test_parameters_without_a_gradient() -> None:
    model = Unused()
    found = hfpatch.check(model, {}, batch=BATCH)
    hazard = one(found, "no-gradient")
    assert hazard.reason.startswith("2 of ")
    assert "head.weight, head.bias" in hazard.reason
    idle = [line for line in found.not_looked_at if "does not reach" in line]
    assert len(idle) == 1
    assert "tower.weight, tower.bias" in idle[0], "it did not run, which is no hazard of the model"
    assert not [
        x
        for x in hfpatch.check(model, {}, batch={**BATCH, "features": torch.ones(2, 12, 4)}).not_looked_at
        if "reach" in x
    ]


def test_adapters_are_judged_on_b() -> None:
    model = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"], r=2))
    assert not hfpatch.check(model, {}, batch=BATCH), "in the first step every A has a gradient of 0"
    model.base_model.model.model.layers[0].self_attn.forward = None
    del model.base_model.model.model.layers[0].self_attn.forward
    llava = tiny_model("vipllava", task="multimodal")
    adapted = get_peft_model(llava, LoraConfig(target_modules=r".*vision_tower.*(q_proj|fc1)", r=2))
    found = hfpatch.check(adapted, {}, batch=example_inputs(llava))
    adapted.train()
    adapted(**example_inputs(llava)).loss.backward()
    dead = [n for n, p in adapted.named_parameters() if p.requires_grad and p.grad is None]
    assert ("no-gradient" in found.ids) == bool(dead)


@pytest.mark.parametrize("architecture", ["git", "udop"])
def test_advice_for_a_step_that_raises_was_tried(architecture: str) -> None:
    task = "multimodal"
    model = tiny_model(architecture, task=task)
    batch = example_inputs(model)
    adapted = get_peft_model(model, hfpatch.lora_config(model, r=2, verbose=False))
    key = kwargs_name()
    args = {key: True, f"{key}_kwargs": {"use_reentrant": True}}
    found = hfpatch.check(adapted, args, batch=batch)
    troubled = [h for h in found if h.id in ("step-raises", "checkpointing-cuts-off")]
    if not troubled:
        assert "no-gradient" not in found.ids
        return
    assert all("tried on this batch" in h.change for h in troubled), str(found)
    if "use_reentrant': False" in troubled[0].change:
        again = hfpatch.check(adapted, {key: True, f"{key}_kwargs": {"use_reentrant": False}}, batch=batch)
        assert "step-raises" not in again.ids, str(again)


class Scaled(nn.Module):
    """Scales embeddings that the language model scales as well."""

    def __init__(self, architecture: str, factor: float, loud: float = 1.0) -> None:
        super().__init__()
        self.llm = tiny_model(architecture)
        self.audio = nn.Linear(8, self.llm.config.hidden_size)
        self.factor, self.loud = factor, loud

    def forward(self, audio: torch.Tensor, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        embeds = self.llm.get_input_embeddings()(input_ids) * self.factor
        return self.llm(inputs_embeds=torch.cat([self.audio(audio) * self.loud, embeds], 1), labels=labels)


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3_text"])
def test_an_embedding_scale_applied_twice(architecture: str) -> None:
    batch = {"audio": torch.randn(2, 3, 8), "input_ids": IDS, "labels": torch.cat([IDS[:, :3], IDS], 1)}
    scale = math.sqrt(tiny_model(architecture).config.hidden_size)
    hazard = one(hfpatch.check(Scaled(architecture, scale), {}, batch=batch), "embedding-scale")
    assert f"{scale:.3g} times as large as llm itself" in hazard.reason
    assert "applied twice" in hazard.reason
    assert "embedding-scale" not in hfpatch.check(Scaled(architecture, 1.0), {}, batch=batch).ids
    assert "embedding-scale" not in hfpatch.check(Scaled("llama", 1.0), {}, batch=batch).ids
    loud = hfpatch.check(Scaled("llama", 1.0, loud=1e3), {}, batch=batch)
    assert "joined-too-large" in loud.ids


def test_everything_is_put_back() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.llm = tiny_model("llama", attention_dropout=0.5)
            self.norm = nn.BatchNorm1d(32)
            self.calls = 0

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            self.calls += 1
            self.seen = input_ids
            np.random.rand()
            embeds = self.llm.get_input_embeddings()(input_ids)
            return self.llm(inputs_embeds=self.norm(embeds.transpose(1, 2)).transpose(1, 2), labels=labels)

    model = Counts().eval()
    model.llm.lm_head.weight.grad = torch.ones_like(model.llm.lm_head.weight)
    before = copy.deepcopy(model.state_dict())
    grads = {n: p.grad for n, p in model.named_parameters()}
    state, numbers = torch.get_rng_state(), np.random.get_state()[1].copy()
    keys = [(m.training, sorted(m.__dict__)) for m in model.modules()]
    found = hfpatch.check(model, {"gradient_checkpointing": True}, batch=BATCH)
    assert found.measured, str(found)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is grads[n] for n, p in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == numbers).all()
    assert [(m.training, sorted(m.__dict__)) for m in model.modules()] == keys
    assert model.calls == 0


def test_an_interruption_leaves_nothing() -> None:
    class Stops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.llm = tiny_model("llama")

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            self.llm(input_ids, labels=labels)
            raise KeyboardInterrupt

    model = Stops().eval()
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    with pytest.raises(KeyboardInterrupt):
        hfpatch.check(model, {"gradient_checkpointing": True}, batch=BATCH)
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert not any(m.training for m in model.modules())
    assert not model.llm.is_gradient_checkpointing


def test_a_report_names_what_was_looked_at() -> None:
    bare = hfpatch.check(tiny_model("llama"))
    assert not bare.measured
    assert any(
        line.startswith("the first loss, errors in forward") and "no batch=" in line for line in bare.not_looked_at
    )
    assert any("no training arguments" in line for line in bare.not_looked_at)
    full = hfpatch.check(tiny_model("llama"), {}, batch=BATCH)
    assert any("gradients of" in line for line in full.measured)
    for word in ("measured: ", "read: ", "not looked at: "):
        assert word in str(full)
    assert full.to_dict().keys() == {"model", "hazards", "remarks", "measured", "read", "not_looked_at"}


def test_a_composite_of_the_card() -> None:
    model = SpeechLLM(tiny_model("llama"))
    width = model.ln_speech.normalized_shape[0]
    labels = torch.cat([torch.full((2, 3), -100), IDS], 1)
    batch = {"input_ids": IDS, "labels": labels, "features": torch.randn(2, 3, width)}
    found = hfpatch.check(model, {}, batch=batch)
    assert "step-raises" not in found.ids, str(found)
    assert any("token embeddings" in line for line in found.measured), found.measured


def test_a_batch_with_other_keys() -> None:
    with pytest.raises(InputError, match="does not take this batch"):
        hfpatch.check(Unused(), {}, batch={**BATCH, "pixels": IDS})


def test_a_log_hides_a_nan_only_where_one_can_come() -> None:
    model = tiny_model("llama").bfloat16()
    found = hfpatch.check(model, {"bf16": True, "learning_rate": 1e-6}, batch=BATCH)
    assert found.ids == ("steps-lost", "buffers-cast")
    masked = hfpatch.check(model, {"bf16": True}, batch={**BATCH, "labels": torch.full_like(IDS, -100)})
    assert "nan-hidden-from-log" in masked.ids
