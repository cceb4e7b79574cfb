"""New parameters of adapters join an optimizer that exists: the group of their siblings, once, and leave it again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import hfpatch
from hfpatch.errors import InputError
from hfpatch.lab.tiny import tiny_model
from tests.test_lora_expansion import ID, expand, lora

IDS = torch.arange(24).reshape(2, 12) % 64


def halves(model: nn.Module, half: str) -> list[nn.Parameter]:
    return [p for n, p in model.named_parameters() if half in n]


def adapters(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def groups(model: nn.Module, optimizer: Any) -> list[list[str]]:
    """The names of the parameters in each group."""
    names = {id(p): n for n, p in model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def step(model: nn.Module, optimizer: Any) -> None:
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def by_half(model: nn.Module) -> torch.optim.Optimizer:
    """LoRA+: another learning rate for B, and no weight decay."""
    pairs = [{"params": halves(model, "lora_A")}, {"params": halves(model, "lora_B"), "lr": 16e-3, "weight_decay": 0.0}]
    return torch.optim.AdamW(pairs, lr=1e-3)


def test_each_half_joins_its_group_once(capsys: Any) -> None:
    model = lora().train()
    optimizer = by_half(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))
    step(model, optimizer)
    schedule.step()
    was, held = groups(model, optimizer), len(optimizer.state)
    fix = expand(model)
    capsys.readouterr()

    added = fix.add_to(optimizer)
    assert {id(p) for p in added} == {id(p) for p in fix.new_parameters}
    assert groups(model, optimizer) == [
        [n for n, _ in model.named_parameters() if half in n] for half in ("lora_A", "lora_B")
    ]
    said = capsys.readouterr().err
    assert "40 parameters added to AdamW: 20 lora_A to group 0 (lr 0.0005, weight_decay 0.01)" in said
    assert "20 lora_B to group 1 (lr 0.008, weight_decay 0)" in said
    for _ in range(2):
        step(model, optimizer)
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-3 / 4, 16e-3 / 4])
    assert [group["initial_lr"] for group in optimizer.param_groups] == [1e-3, 16e-3]
    assert all(p.any() for p in fix.new_parameters)
    assert {int(optimizer.state[p]["step"]) for p in added} == {2}

    assert fix.add_to(optimizer) == ()
    assert "nothing to add to AdamW: the 40 new parameters are in it already" in capsys.readouterr().err
    fix.revert()
    assert groups(model, optimizer) == was
    assert len(optimizer.state) == held
    assert "40 parameters taken out of AdamW, with their state" in capsys.readouterr().err
    assert fix.add_to(optimizer) == ()
    assert "no parameters that these patches added" in capsys.readouterr().err


def test_a_revert_without_the_handle_is_followed_by_one_with_it() -> None:
    model = lora()
    optimizer = torch.optim.AdamW(adapters(model))
    fix = expand(model)
    fix.add_to(optimizer)
    hfpatch.revert(model)
    assert len(optimizer.param_groups[0]["params"]) == 56
    fix.revert()
    assert [len(names) for names in groups(model, optimizer)] == [16]


CLASSES = [
    cls
    for cls in vars(torch.optim).values()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_optimizer_of_torch_steps_on_or_refuses(cls: Any) -> None:
    """A class that makes state for its parameters when it is created would raise in its next step."""
    model = lora().train()
    optimizer = cls(adapters(model))
    if cls is torch.optim.LBFGS:
        optimizer.step(lambda: model(input_ids=IDS, labels=IDS).loss)
    fix = expand(model)
    before = groups(model, optimizer)
    if cls in (torch.optim.LBFGS, torch.optim.Adagrad):
        with pytest.raises(InputError, match=f"{cls.__name__} fixes its state"):
            fix.add_to(optimizer)
        assert groups(model, optimizer) == before
        return
    assert len(fix.add_to(optimizer)) == 40
    if cls is torch.optim.SparseAdam:  # takes no dense gradients, with or without new parameters
        return
    for _ in range(2):
        step(model, optimizer)
    assert all(p.any() for p in fix.new_parameters)


@pytest.mark.parametrize("words", [{"fused": True}, {"foreach": True}, {"amsgrad": True}], ids=str)
def test_kinds_of_adam(words: dict[str, Any]) -> None:
    model = lora().train()
    optimizer = torch.optim.AdamW(adapters(model), lr=1e-2, **words)
    step(model, optimizer)
    fix = expand(model)
    fix.add_to(optimizer)
    with torch.no_grad():
        for p in fix.new_parameters:
            p.grad = torch.ones_like(p)
    was = {id(p): p.detach().clone() for p in fix.new_parameters}
    optimizer.step()
    decay = 1 - 1e-2 * 1e-2
    for p in fix.new_parameters:  # the first step of Adam is the learning rate, whatever the gradient
        torch.testing.assert_close(p.detach(), was[id(p)] * decay - 1e-2, rtol=1e-4, atol=1e-6)


def test_groups_by_layer_are_found_by_the_path() -> None:
    model = lora()
    layers = [
        {"params": [p for n, p in model.named_parameters() if f"layers.{i}." in n and "lora_" in n], "lr": 10.0**-i}
        for i in range(4)
    ]
    optimizer = torch.optim.SGD(layers)
    fix = expand(model)
    assert len(fix.add_to(optimizer)) == 40
    for number, names in enumerate(groups(model, optimizer)):
        assert len(names) == 14
        assert all(f"layers.{number}." in name for name in names)


def test_the_order_is_that_of_an_optimizer_made_anew() -> None:
    """A state saved after the expansion is loaded by position in another process."""
    model = lora().train()
    optimizer = torch.optim.AdamW(adapters(model), lr=1e-2)
    step(model, optimizer)
    expand(model).add_to(optimizer)
    step(model, optimizer)
    anew = torch.optim.AdamW(adapters(model), lr=1e-2)
    anew.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p in adapters(model):
        assert torch.equal(anew.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])


def test_without_the_models_order_new_ones_come_last() -> None:
    model = lora()
    optimizer = torch.optim.AdamW(adapters(model)[::-1])
    was = groups(model, optimizer)[0]
    expand(model).add_to(optimizer)
    assert groups(model, optimizer)[0][: len(was)] == was


@pytest.mark.parametrize("inside", [True, False], ids=["from a part", "from the whole"])
def test_names_that_the_optimizer_keeps(inside: bool) -> None:
    model: Any = lora()
    part = model.base_model.model if inside else model
    optimizer = torch.optim.AdamW([(n, p) for n, p in part.named_parameters() if p.requires_grad])
    expand(model).add_to(optimizer)
    names = {id(p): n for n, p in part.named_parameters()}
    group = optimizer.param_groups[0]
    assert group["param_names"] == [names[id(p)] for p in group["params"]]


KINDS: dict[str, tuple[Callable[[], Any], int]] = {
    "DoRA": (lambda: lora(use_dora=True), 60),
    "biases of B": (lambda: lora(lora_bias=True), 60),
    "bfloat16": (lambda: lora(dtype=torch.bfloat16).bfloat16(), 40),
    "an embedding and q": (lambda: lora(target_modules=["q_proj", "embed_tokens"]), 48),
    "biases of the base": (
        lambda: lora("gpt2", target_modules=["c_attn"], fan_in_fan_out=True, bias="lora_only"),
        36,
    ),
    "inside another model": (lambda: nn.ModuleDict({"llm": lora()}), 40),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_adapters(kind: str) -> None:
    make, count = KINDS[kind]
    model = make()
    weights = [p for n, p in model.named_parameters() if p.requires_grad and not n.endswith("bias")]
    biases = [p for n, p in model.named_parameters() if p.requires_grad and n.endswith("bias")]
    optimizer = torch.optim.AdamW([{"params": weights}, *([{"params": biases, "weight_decay": 0.0}] if biases else [])])
    was = groups(model, optimizer)
    fix = expand(model)
    assert len(fix.add_to(optimizer)) == count
    assert sum(map(len, groups(model, optimizer))) == len(adapters(model))
    for number, names in enumerate(groups(model, optimizer)):
        assert {n.endswith("bias") for n in names} == {number == 1}
    fix.revert()
    assert groups(model, optimizer) == was


def test_only_the_optimizer_of_this_model() -> None:
    model, other = lora(), lora()
    fix = expand(model)
    with pytest.raises(InputError, match="16 parameters, none of them of this PeftModel"):
        fix.add_to(torch.optim.SGD(adapters(other)))
    with pytest.raises(InputError, match=r"got a value of type LambdaLR|want a torch optimizer"):
        fix.add_to(torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(adapters(model)), lambda _: 1.0))


def test_settings_that_nothing_tells() -> None:
    model: Any = lora()
    head = torch.optim.SGD([model.base_model.model.lm_head.weight])
    attention = model.base_model.model.model.layers
    parts = [
        [p for n, p in attention.named_parameters() if half in n and "lora_" in n] for half in ("q_proj", "v_proj")
    ]
    split = torch.optim.SGD([{"params": part} for part in parts])
    fix = expand(model)
    for optimizer, where in ((head, "in none of its groups"), (split, "in groups 0, 1")):
        before = groups(model, optimizer)
        with pytest.raises(InputError, match=where):
            fix.add_to(optimizer)
        assert groups(model, optimizer) == before


def test_frozen_adapters_stay_out(capsys: Any) -> None:
    model: Any = lora()
    model.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD([model.base_model.model.lm_head.weight])
    assert expand(model).add_to(optimizer) == ()
    assert "in it already, or frozen" in capsys.readouterr().err


class Stops(list[Any]):
    """Parameters of a group that are written once an interruption came."""

    raises = True

    def __setitem__(self, *args: Any) -> None:
        if self.raises:
            self.raises = False
            raise KeyboardInterrupt
        super().__setitem__(*args)


def test_an_interruption_adds_nothing() -> None:
    model = lora()
    optimizer = by_half(model)
    optimizer.param_groups[1]["params"] = Stops(optimizer.param_groups[1]["params"])
    was = groups(model, optimizer)
    fix = expand(model)
    with pytest.raises(KeyboardInterrupt):
        fix.add_to(optimizer)
    assert groups(model, optimizer) == was


class Expands(TrainerCallback):
    """The adapter gains its layers in the middle of a run."""

    fix: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.fix = expand(kwargs["model"])
            self.fix.add_to(kwargs["optimizer"])


@pytest.mark.parametrize("plus", [False, True], ids=["AdamW", "LoRA+"])
def test_in_the_middle_of_a_trainers_run(plus: bool, tmp_path: Path) -> None:
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    args = TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=2, report_to=[], save_strategy="no", use_cpu=True,
        learning_rate=1e-2, lr_scheduler_type="linear", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    rows = [{"input_ids": IDS[i % 2], "labels": IDS[i % 2]} for i in range(8)]
    expands = Expands()
    made = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=16) if plus else None
    trainer: Any = Trainer(model, args, train_dataset=rows, callbacks=[expands], optimizers=(made, None))
    trainer.train()
    fix, optimizer = expands.fix, trainer.optimizer.optimizer
    assert len(fix.new_parameters) == 40
    assert all(p.any() for p in fix.new_parameters)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(adapters(model)) == 56
    assert {group["lr"] for group in optimizer.param_groups} == {0.0}  # at the end of the schedule
    assert not hfpatch.plan(model, only=ID).edits
    fix.revert()
    assert len(optimizer.state) == 16
