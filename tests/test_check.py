"""`hfpatch.check`: each hazard happens where it is reported, and is not reported where it does not."""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from hfpatch.errors import InputError, NotAModelError
from hfpatch.guarding.checking.hazard import Hazard, Hazards
from hfpatch.guarding.checking.hazards import check
from hfpatch.guarding.checks import can_unscale
from hfpatch.lab.tiny import SpeechLLM, tiny_config, tiny_model
from hfpatch.model.source import build_on_meta
from tests.sampling import first_quick
from tests.test_guard_trainer import logs, trainer

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
IDS = (torch.arange(24).reshape(2, 12) * 7 + 3) % 60 + 2
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def one(found: Hazards, name: str) -> Hazard:
    assert name in found.ids, str(found)
    return next(h for h in found if h.id == name)


def arguments(path: Path, **kwargs: Any) -> TrainingArguments:
    fixed: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    return TrainingArguments(output_dir=str(path), **{**fixed, "use_cpu": True, **kwargs})


def loaded_in(model: Any, dtype: torch.dtype) -> Any:
    """With its parameters in a dtype and its buffers as they are, as `from_pretrained(dtype=)` leaves it."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def lora(model: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, **kwargs)
    return get_peft_model(loaded_in(model, dtype), config)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


# dtypes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_scaler_refuses_what_is_said_to_be_refused(device: str, dtype: torch.dtype) -> None:
    model = net().to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device)
    with torch.autocast(device, dtype=torch.float16):
        loss = model(torch.randn(4, 8, device=device)).float().square().mean()
    scaler.scale(loss).backward()
    refused = False
    try:
        scaler.unscale_(optimizer)
    except (ValueError, NotImplementedError):
        refused = True
    assert refused is not can_unscale(torch.device(device), dtype)
    assert refused or dtype is not torch.float16
    found = check(model, {"fp16": True}, optimizer=optimizer, device=device)
    if dtype is torch.float32:
        assert not found, str(found)
        return
    name = "fp16-parameters" if dtype is torch.float16 else "bf16-under-scaler"
    hazard = one(found, name)
    assert hazard.certain is refused
    assert "4 of 4 trained parameters (0.weight first) are" in hazard.reason


def test_bfloat16_weights_are_no_hazard_without_a_scaler_or_where_only_adapters_train() -> None:
    model = loaded_in(tiny_model("llama"), torch.bfloat16)
    assert not check(model, {"bf16": True})
    assert not check(model, {})
    assert one(check(model, {"fp16": True}), "bf16-under-scaler")
    assert not check(lora(model, torch.bfloat16), {"fp16": True}), "PEFT keeps adapters in float32"
    kept = lora(tiny_model("llama"), torch.bfloat16)
    for parameter in kept.parameters():
        parameter.data = parameter.data.bfloat16()
    hazard = one(check(kept, {"fp16": True}), "bf16-under-scaler")
    assert re.match(r"16 of 16 trained parameters \(\S+lora_A\S+ first\) are bfloat16", hazard.reason), hazard.reason


def test_float16_weights_lose_small_steps_without_a_scaler() -> None:
    weight = nn.Linear(4, 4, bias=False).half()
    nn.init.ones_(weight.weight)
    optimizer = torch.optim.SGD(weight.parameters(), lr=1e-4)
    weight.weight.grad = torch.ones_like(weight.weight)
    optimizer.step()
    assert bool((weight.weight == 1).all()), "the step is lost"
    found = check(weight, {"bf16": True}, optimizer=optimizer)
    assert not one(found, "fp16-parameters").certain
    assert not check(weight.float(), {"bf16": True}, optimizer=optimizer)


def test_a_fused_optimizer_without_clipping_lets_float16_pass() -> None:
    model = net().half()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, eps=1e-4)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.randn(4, 8).half()).float().square().mean()).backward()
    scaler.step(optimizer)  # clips nothing, so nobody can_unscale
    assert all(p.isfinite().all() for p in model.parameters())
    assert not one(check(model, {"fp16": True, "max_grad_norm": 0}), "fp16-parameters").certain
    assert one(check(model, {"fp16": True}), "fp16-parameters").certain


def steps_of_adam(dtype: torch.dtype, fused: bool, eps: float = 1e-8) -> list[float]:
    """How far a weight of 0 goes in each step of a gradient of 1e-5, in learning rates."""
    weight = nn.Parameter(torch.zeros(8, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, eps=eps, fused=fused)
    moved = []
    for _ in range(300):
        weight.grad = torch.full_like(weight, 1e-5)
        weight.data.zero_()
        optimizer.step()
        moved.append(weight.detach().float().abs().max().item() / 1e-3)
    return moved


@pytest.mark.parametrize(("optim", "fused"), [("adamw_torch", False), ("adamw_torch_fused", True)])
def test_eps_that_is_zero(optim: str, fused: bool) -> None:
    moved = steps_of_adam(torch.float16, fused)
    model = net().half()
    by_name = one(check(model, {"optim": optim}), "adam-eps-zero")
    by_optimizer = one(check(model, optimizer=torch.optim.AdamW(model.parameters(), fused=fused)), "adam-eps-zero")
    if fused:
        assert all(map(math.isfinite, moved))
        assert moved[-1] > 10
        assert "many times the learning rate" in by_name.reason
    else:
        assert not math.isfinite(moved[0])
        assert "non-finite" in by_name.reason
    assert by_name.certain is by_optimizer.certain is not fused
    assert "1e-08" in by_name.reason
    assert "0.weight" in by_optimizer.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_eps_that_is_not_zero(dtype: torch.dtype) -> None:
    assert max(steps_of_adam(dtype, fused=False)) < 1.1
    assert not check(net().to(dtype), {"optim": "adamw_torch"})


def test_the_change_to_eps_mends_it() -> None:
    assert all(map(math.isfinite, steps_of_adam(torch.float16, fused=False, eps=1e-4)))
    model = net().half()
    for args in ({"optim": "adamw_torch", "adam_epsilon": 1e-4}, {"optim": "adamw_torch", "optim_args": "eps=1e-4"}):
        assert "adam-eps-zero" not in check(model, args).ids
    assert "adam-eps-zero" not in check(model, {"optim": "adafactor"}).ids


class Quantised(nn.Module):
    """An 8-bit layer as libraries make them: integers, a scale, and the dtype to compute in."""

    def __init__(self, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8, 8), 100, dtype=torch.int8), requires_grad=False)
        self.adapter = nn.Linear(8, 8)
        self.compute_dtype = compute_dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.to(self.compute_dtype), self.weight.to(self.compute_dtype)).float()


def test_a_quantised_base_in_float16() -> None:
    x = torch.full((1, 8), 1e3)
    half, wide = nn.Sequential(Quantised(torch.float16)), nn.Sequential(Quantised(torch.bfloat16))
    assert not half(x).isfinite().any()
    assert wide(x).isfinite().all()
    assert "1 quantised layers (0 first) compute in float16" in one(check(half, {}), "quantised-fp16").reason
    assert not check(wide, {"bf16": True})
    assert "float16 autocast" in one(check(wide, {"fp16": True}), "quantised-fp16").reason


def test_a_quantised_base_that_a_config_asks_for() -> None:
    config = tiny_config("llama", dtype="float16")
    config.quantization_config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_compute_dtype": "float16",
    }
    found = check(build_on_meta(config), {"fp16": True})
    assert found.ids == ("quantised-fp16", "nan-hidden-from-log"), "the base is frozen: its dtype is no hazard"
    config.quantization_config["bnb_4bit_compute_dtype"] = "bfloat16"
    assert not check(build_on_meta(config), {"bf16": True})


def test_a_card_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    model = tiny_model("llama")
    for made, args in ((model, {"bf16": True}), (lora(tiny_model("llama"), torch.bfloat16), {})):
        hazard = one(check(made, args), "no-bf16-here")
        assert "Tesla T4 has compute capability 7.5" in hazard.reason
    assert not check(model, {"fp16": True})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert not check(model, {"bf16": True})
    assert not check(model, {"bf16": True, "use_cpu": True})


def left_padded(implementation: str, dtype: torch.dtype) -> Any:
    """Scores near -100, as in a trained model with large biases."""
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=64, num_key_value_heads=2, **SMALL)
    model = Qwen2ForCausalLM._from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.bias", "k_proj.bias")):
                parameter.fill_(6.0 if "q_proj" in name else -6.0)
    return model.to(dtype).requires_grad_(False).train()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("side", ["left", "right"])
def test_left_padding(implementation: str, dtype: torch.dtype, side: str) -> None:
    model = left_padded(implementation, dtype)
    mask = torch.ones_like(IDS)
    mask[0, slice(0, 6) if side == "left" else slice(6, 12)] = 0
    batch = {"input_ids": IDS, "attention_mask": mask}
    with torch.no_grad():
        logits = model(**batch).logits
    happens = bool(logits[mask.bool()].isnan().any())
    assert happens == (implementation == "eager" and dtype is torch.float16 and side == "left")
    found = check(lora(model, dtype), batch=batch)
    assert ("left-padding-fp16" in found.ids) == happens
    if happens:
        assert "1 of 2 rows of this batch are padded on the left" in one(found, "left-padding-fp16").reason


def test_left_padding_without_a_batch_is_a_maybe() -> None:
    found = check(lora(left_padded("eager", torch.float16), torch.float16))
    assert "if rows are padded on the left" in one(found, "left-padding-fp16").reason


# the loss


class Multimodal(nn.Module):
    """A hand-written one, whose forward takes everything and uses what it knows."""

    def __init__(self) -> None:
        super().__init__()
        self.llm = tiny_model("llama")
        self.projector = nn.Linear(4, 32)

    def forward(self, input_ids: Any, labels: Any = None, features: Any = None, **kwargs: Any) -> Any:
        embeds = self.llm.get_input_embeddings()(input_ids)
        if features is not None:
            embeds = embeds + self.projector(features)
        return self.llm(inputs_embeds=embeds, labels=labels)


class OwnLoss(Multimodal):
    """Passes its kwargs on, and then computes the loss by itself."""

    def forward(self, input_ids: Any, labels: Any = None, features: Any = None, **kwargs: Any) -> Any:
        logits = self.llm(inputs_embeds=self.llm.get_input_embeddings()(input_ids), **kwargs).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class Passing(Multimodal):
    """Passes its kwargs on to a model that divides."""

    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:
        embeds = self.llm.get_input_embeddings()(input_ids)
        return self.llm(inputs_embeds=embeds, labels=labels, **kwargs)


class Dividing(Multimodal):
    """Divides by itself."""

    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.llm(inputs_embeds=self.llm.get_input_embeddings()(input_ids)).logits
        total = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return {"loss": total / kwargs.get("num_items_in_batch", labels[:, 1:].numel()), "logits": logits}


class Declared(Multimodal):
    """The change that `check` names."""

    accepts_loss_kwargs = False


class Named(Multimodal):
    """No kwargs, so that the Trainer divides."""

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        return super().forward(input_ids, labels)


def classifier() -> Any:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(vocab_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SMALL)
    )


def translator() -> Any:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0,
            dropout_rate=0.0,
        )
    )  # fmt: skip


SWALLOW = {"unused": Multimodal, "own loss": OwnLoss, "stock classifier": classifier, "stock translator": translator}
DIVIDE = {
    "passed on": Passing, "by itself": Dividing, "declared": Declared, "named": Named,
    "stock": lambda: tiny_model("llama"),
}  # fmt: skip


def growth(make: Any, path: Path) -> float:
    """Loss that a Trainer computes with four micro-batches over that with one batch of the same rows."""
    shown = []
    for parts in (1, 4):
        torch.manual_seed(0)
        model = make()
        labels = (lambda i, ids: i % 2) if isinstance(model, BertForSequenceClassification) else (lambda i, ids: ids)
        data: Any = []
        for i in range(8):
            ids = [(i * 5 + j * 3) % 60 + 2 for j in range(8)]
            data.append({"input_ids": ids, "labels": labels(i, ids)})
        args = arguments(
            path, per_device_train_batch_size=8 // parts, gradient_accumulation_steps=parts, max_steps=1,
            train_sampling_strategy="sequential",
        )  # fmt: skip
        made = Trainer(model=model, args=args, train_dataset=data)
        made.train()
        shown.append(logs(made)[0])
    assert shown[1]["grad_norm"] / shown[0]["grad_norm"] == pytest.approx(shown[1]["loss"] / shown[0]["loss"], rel=1e-2)
    return shown[1]["loss"] / shown[0]["loss"]


def labelled(model: Any) -> dict[str, torch.Tensor]:
    return {
        "input_ids": IDS,
        "labels": torch.tensor([0, 1]) if isinstance(model, BertForSequenceClassification) else IDS,
    }


@pytest.mark.parametrize("kind", SWALLOW)
@pytest.mark.slow
def test_a_loss_that_grows_with_accumulation(kind: str, tmp_path: Path) -> None:
    assert growth(SWALLOW[kind], tmp_path) == pytest.approx(4.0, rel=1e-2)
    model = SWALLOW[kind]()
    args = arguments(tmp_path, gradient_accumulation_steps=4)
    read = one(check(model, args), "loss-not-divided")
    measured = one(check(model, args, batch=labelled(model)), "loss-not-divided")
    assert (read.certain, measured.certain) == (False, True)
    assert "loss and gradients are 4 times too large" in read.reason
    assert "its loss on this batch is" in measured.reason
    assert not check(model, arguments(tmp_path)), "one micro-batch: nothing to divide"
    assert not check(model, arguments(tmp_path, gradient_accumulation_steps=4, label_smoothing_factor=0.1))
    model.accepts_loss_kwargs = False
    assert not check(model, args), "the change that is named"
    assert growth(lambda: declared(SWALLOW[kind]()), tmp_path) == pytest.approx(1.0, rel=1e-2)


def declared(model: Any) -> Any:
    model.accepts_loss_kwargs = False
    return model


def test_a_batch_without_labels_says_nothing_of_the_loss() -> None:
    batch = {"input_ids": IDS, "labels": torch.full_like(IDS, -100)}
    for model in (tiny_model("llama"), Multimodal()):
        assert "loss-not-divided" not in check(model, {"gradient_accumulation_steps": 4}, batch=batch).ids


@pytest.mark.parametrize("kind", DIVIDE)
@pytest.mark.slow
def test_a_loss_that_does_not(kind: str, tmp_path: Path) -> None:
    assert growth(DIVIDE[kind], tmp_path) == pytest.approx(1.0, rel=1e-2)
    model = DIVIDE[kind]()
    args = arguments(tmp_path, gradient_accumulation_steps=4)
    assert not check(model, args)
    assert not check(model, args, batch=labelled(model))


def test_what_cannot_be_told_is_not_said() -> None:
    args = {"gradient_accumulation_steps": 4}
    assert not check(SpeechLLM(tiny_model("llama")), args)
    script: dict[str, Any] = {"nn": nn}
    exec("class Typed(nn.Linear):\n    def forward(self, x, labels=None, **kwargs): return {}", script)  # noqa: S102
    assert not check(script["Typed"](4, 4), args), "there is no source to read"
    found = check(OwnLoss(), args, batch={"input_ids": IDS, "start_positions": IDS[:, 0]})
    assert found.ids[0] == "step-raises", "its forward wants labels"
    assert "loss-not-divided" not in found.ids, "the Trainer counts none"


# checkpointing


def vit(**kwargs: Any) -> Any:
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, **SMALL, **kwargs))


def vision_lora() -> Any:
    """An adapter in the layers, and a classifier that trains: the loss has a gradient either way."""
    return get_peft_model(vit(), LoraConfig(target_modules=["q_proj", "v_proj"], r=4, modules_to_save=["classifier"]))


IMAGES = {"pixel_values": torch.ones(2, 3, 16, 16), "labels": torch.tensor([0, 1])}


def with_gradients(model: Any, batch: dict[str, Any]) -> int:
    """Parameters of the adapter that a step reaches."""
    model.train()
    model(**batch).loss.backward()
    return sum(p.grad is not None for n, p in model.named_parameters() if "lora_" in n)


def kwargs_name() -> str:
    return (
        "activation_checkpointing"
        if hasattr(TrainingArguments, "activation_checkpointing")
        else "gradient_checkpointing"
    )


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("given", [IMAGES, None])
def test_checkpointing_that_cuts_off(reentrant: bool, given: Any, tmp_path: Path) -> None:
    key = kwargs_name()
    args = arguments(
        tmp_path, max_steps=1, **{key: True, f"{key}_kwargs": {"use_reentrant": reentrant}}, remove_unused_columns=False
    )
    model = vision_lora()
    before = copy.deepcopy(model.state_dict())
    found = check(model, args, batch=given)
    data: Any = [{"pixel_values": torch.randn(3, 16, 16), "labels": i % 2} for i in range(8)]
    Trainer(model=model, args=args, train_dataset=data).train()
    moved = [n for n, p in model.state_dict().items() if not torch.equal(p, before[n])]
    assert any("classifier" in n for n in moved)
    happens = not any("lora_" in n for n in moved)
    assert happens == reentrant
    assert ("checkpointing-cuts-off" in found.ids) == happens
    if happens:
        hazard = one(found, "checkpointing-cuts-off")
        assert hazard.certain is (given is not None)
        assert "layers.0" in hazard.reason or "layer.0" in hazard.reason
        assert ("8 of 10 trained parameters" if given else "the 8 trained parameters") in hazard.reason
        assert ("tried on this batch: all of them" in hazard.change) is (given is not None)
        # it is on now: told from the model itself
        assert "checkpointing-cuts-off" in check(model, batch=given).ids
        assert with_gradients(model, IMAGES) == 0
        model.zero_grad()
        model.enable_input_require_grads()
        assert with_gradients(model, IMAGES) == 8
        assert "checkpointing-cuts-off" not in check(model, batch=given).ids


def test_checkpointing_without_a_word_on_how() -> None:
    model = vision_lora()
    assert not check(model, {kwargs_name(): True}), "transformers then asks for the other implementation"
    model.base_model.model._set_gradient_checkpointing(True, functools.partial(checkpoint, use_reentrant=False))
    assert not check(model, batch=IMAGES)
    assert with_gradients(model, IMAGES) == 8
    model.zero_grad()
    model.base_model.model._set_gradient_checkpointing(True, functools.partial(checkpoint, preserve_rng_state=True))
    assert one(check(model, batch=IMAGES), "checkpointing-cuts-off").certain, "torch's default is the reentrant one"
    assert with_gradients(model, IMAGES) == 0


def test_checkpointing_that_does_not() -> None:
    key = kwargs_name()
    reentrant = {key: True, f"{key}_kwargs": {"use_reentrant": True}}
    text = lora(tiny_model("llama"))
    assert not check(text, reentrant), "transformers makes the embeddings require gradients"
    embeds = {"inputs_embeds": torch.randn(2, 12, 32), "labels": IDS}
    found = check(text, reentrant, batch=embeds)
    assert one(found, "checkpointing-cuts-off").certain, "but not those that are passed in"
    text.base_model.model._set_gradient_checkpointing(True, functools.partial(checkpoint, use_reentrant=True))
    text.train()
    with pytest.raises(RuntimeError, match="does not require grad"):
        text(**embeds).loss.backward()
    whole = vit()
    assert not check(whole, reentrant), "the patch embedding trains"
    composite = Multimodal()
    composite.llm.requires_grad_(False)
    composite.llm = lora(composite.llm)
    composite.llm.base_model.model._set_gradient_checkpointing(True, functools.partial(checkpoint, use_reentrant=True))
    batch = {"input_ids": IDS, "labels": IDS, "features": torch.randn(2, 12, 4)}
    assert not check(composite, batch=batch), "the projector trains, and comes before"
    assert not check(composite)
    composite.projector.requires_grad_(False)
    assert one(check(composite, batch=batch), "checkpointing-cuts-off").certain
    assert not one(check(composite), "checkpointing-cuts-off").certain


# the rest


def test_nothing_trains() -> None:
    model = net().requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        model(torch.randn(1, 8)).sum().backward()
    assert one(check(model), "nothing-trains").certain


def test_clipping_off() -> None:
    moved = []
    for norm in (0.0, 1.0):
        model = net()
        before = model[0].weight.detach().clone()
        (model(torch.randn(4, 8)).square().mean() * 1e6).backward()
        if norm:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        moved.append((model[0].weight - before).norm().item())
    assert moved[0] > 1e3
    assert moved[1] <= 0.1
    for off in (0.0, None):
        assert not one(check(net(), {"max_grad_norm": off}), "clipping-off").certain
    assert not check(net(), {})


def test_the_log_hides_a_nan_where_one_may_come(tmp_path: Path) -> None:
    for on in (True, False):
        made = trainer(tmp_path, [], logging_nan_inf_filter=on, max_grad_norm=0.0)
        made.nan_loss = (2,)
        found = check(made.model, made.args)
        assert ("nan-hidden-from-log" in found.ids) is on
        made.train()
        assert math.isnan(logs(made)[-1]["loss"]) is not on
    quiet = check(tiny_model("llama"), {})
    assert not quiet
    assert any("logging_nan_inf_filter is on" in r for r in quiet.remarks)
    assert not any(
        "logging_nan_inf_filter" in r for r in check(tiny_model("llama"), {"logging_nan_inf_filter": False}).remarks
    )


def smollm() -> Any:
    llama: Any = LlamaConfig(vocab_size=64, num_key_value_heads=2, tie_word_embeddings=True, **SMALL)
    model = build_on_meta(llama).to_empty(device="cpu")
    model.init_weights()
    return model


HEALTHY: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "LoRA in bfloat16": (lambda: lora(smollm(), torch.bfloat16), {"bf16": True}),
    "LoRA, defaults": (lambda: lora(tiny_model("llama"), torch.bfloat16), {}),
    "float32": (lambda: tiny_model("llama"), {}),
    "float16 autocast": (lambda: tiny_model("llama"), {"fp16": True}),
    "float16 autocast, accumulation": (
        lambda: lora(tiny_model("qwen2")),
        {"fp16": True, "gradient_accumulation_steps": 8},
    ),
    "checkpointed": (lambda: lora(tiny_model("llama")), {"gradient_checkpointing": True, "bf16": True}),
    "gemma": (lambda: tiny_model("gemma3_text"), {"bf16": True, "gradient_accumulation_steps": 4}),
    "gpt2": (lambda: tiny_model("gpt2"), {"gradient_accumulation_steps": 4}),
}


@pytest.mark.parametrize("kind", first_quick(HEALTHY, every=4))
@pytest.mark.parametrize("batched", [False, True])
def test_no_false_alarm(kind: str, batched: bool, tmp_path: Path) -> None:
    make, settings = HEALTHY[kind]
    model = make()
    batch = {"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS)} if batched else None
    for args in (settings, arguments(tmp_path, **settings)):
        assert not check(model, args, batch=batch), str(check(model, args, batch=batch))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    assert not check(model, settings, optimizer=optimizer, batch=batch)


def test_no_false_alarm_inside_wrappers(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    wrapped = DistributedDataParallel(lora(tiny_model("llama"), torch.bfloat16))
    args = arguments(tmp_path, bf16=True, gradient_accumulation_steps=4)
    assert not check(wrapped, args, batch={"input_ids": IDS, "labels": IDS})
    broken = DistributedDataParallel(Multimodal())
    assert "Multimodal.forward never looks at its **kwargs" in one(check(broken, args), "loss-not-divided").reason


def test_a_trainer_and_a_prepared_optimizer(tmp_path: Path) -> None:
    made = trainer(tmp_path, [])
    assert not check(made, made.args)
    model = net().half()
    prepared = Accelerator(cpu=True).prepare(torch.optim.Adam(model.parameters()))
    assert one(check(model, optimizer=prepared), "adam-eps-zero").certain
    prepared.scaler = torch.amp.GradScaler("cpu")
    assert one(check(model, optimizer=prepared), "fp16-parameters").certain


@dataclass
class Extended(TrainingArguments):
    """As TRL's SFTConfig extends it."""

    packing: bool = False


def test_subclasses_and_accelerate_names(tmp_path: Path) -> None:
    args = Extended(output_dir=str(tmp_path), report_to=[], use_cpu=True, max_grad_norm=0.0)
    assert check(net(), args).ids == ("clipping-off", "nan-hidden-from-log")
    model = net().half()
    assert "fp16-parameters" in check(model, {"mixed_precision": "fp16"}).ids
    assert not check(model.float(), {"mixed_precision": False})
    found = check(model, {"mixed_precision": "bf16", "packing": True, "dataset_name": "x"})
    assert "packing, dataset_name: no keys of TrainingArguments" in found.not_looked_at


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (3, "want TrainingArguments, or a dict with its keys; got int"),
        ({"fp16": True, "bf16": True}, "both true"),
        ({"fp16": "yes"}, "fp16: want true or false, got 'yes'"),
        ({"adam_epsilon": "small"}, "adam_epsilon: want a number of at least 0, got 'small'"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: want a number of at least 1, got 0"),
        ({"max_grad_norm": math.inf}, "max_grad_norm: want a number"),
        ({"mixed_precision": "int3"}, "mixed_precision: want one of no, fp16, bf16, got 'int3'"),
        ({"optim_args": [1]}, "optim_args: want a mapping"),
        ({"optim_args": "{"}, "optim_args: not valid JSON"),
    ],
)
def test_bad_arguments(args: Any, said: str) -> None:
    with pytest.raises(InputError, match="check: ") as error:
        check(net(), args)
    assert said in str(error.value)


def test_bad_models_batches_and_devices() -> None:
    with pytest.raises(NotAModelError):
        check(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"Sequential does not take this batch \(input_ids, labels\): "):
        check(net(), batch={"input_ids": IDS, "labels": IDS})
    raises = one(check(tiny_model("llama"), {"gradient_accumulation_steps": 2}, batch={"labels": IDS}), "step-raises")
    assert "ValueError: You must specify exactly one of input_ids or inputs_embeds" in raises.reason
    for device in ("nowhere", "cuda:99"):
        with pytest.raises(InputError, match="check: device: "):
            check(net(), device=device)


def test_nothing_is_changed() -> None:
    model = Multimodal()
    model.llm = lora(model.llm)
    model.train()
    model.llm.base_model.model.model.layers[0].eval()
    model.llm.base_model.model._set_gradient_checkpointing(True, functools.partial(checkpoint, use_reentrant=True))
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    random = torch.get_rng_state()
    batch = {"input_ids": IDS, "labels": IDS}
    assert one(check(model, {"gradient_accumulation_steps": 4}, batch=batch), "loss-not-divided").certain
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()] == hooks
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    assert set(batch) == {"input_ids", "labels"}


def test_how_it_shows() -> None:
    found = check(net().half(), {"optim": "adamw_torch", "max_grad_norm": 0})
    assert len(found) == len(found.ids) == len(list(found))
    text = str(found)
    assert text.startswith("Sequential: 4 hazards")
    assert all(name in text for name in found.ids)
    assert "certain" in text
    assert "-> " in text
    assert "<table>" in found._repr_html_()
    assert found.to_dict()["hazards"][0].keys() == {"id", "certain", "reason", "change"}
    assert "adam-eps-zero (certain): " in str(one(found, "adam-eps-zero"))
    assert str(check(net(), {})).startswith("Sequential: no hazards")
