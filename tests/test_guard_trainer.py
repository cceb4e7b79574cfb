"""The guard inside a real transformers Trainer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from hfpatch.blackbox import BlackBox
from hfpatch.errors import GuardStop, InputError
from hfpatch.guarding.callback import GuardCallback
from hfpatch.lab.tiny import tiny_model
from tests.ranks import launch
from tests.sampling import slow

ROWS = 16


def rows(masked: tuple[int, ...] = ()) -> list[dict[str, list[int]]]:
    made = []
    for i in range(ROWS):
        ids = [(i * 5 + j * 3) % 60 + 2 for j in range(8)]
        made.append({"input_ids": ids, "attention_mask": [1] * 8, "labels": [-100] * 8 if i in masked else ids})
    return made


class Poisoned(Trainer):
    """A Trainer whose loss is NaN, or its gradients are, in some global steps."""

    nan_loss: tuple[int, ...] = ()
    nan_gradient: tuple[int, ...] = ()

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.state.global_step in self.nan_loss:
            loss = loss * math.nan
        if self.state.global_step in self.nan_gradient:
            loss = loss + (next(model.parameters()) * 0).sum().sqrt()
        return loss


class Watch(TrainerCallback):
    """Weights, moments and schedule after each step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        weights = [p.detach().clone() for p in kwargs["model"].parameters()]
        moments = [
            {k: torch.as_tensor(v).clone() for k, v in s.items()}
            for s in kwargs["optimizer"].state_dict()["state"].values()
        ]
        self.seen.append((weights, moments, kwargs["lr_scheduler"].last_epoch))


def trainer(path: Path, callbacks: list[Any], cls: type[Poisoned] = Poisoned, **kwargs: Any) -> Poisoned:
    data = kwargs.pop("data", None) or rows()
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "max_steps": 6,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "save_strategy": "no",
        "seed": 0,
    }
    arguments.update(kwargs)
    args = TrainingArguments(output_dir=str(path), report_to=[], disable_tqdm=True, use_cpu=True, **arguments)
    return cls(model=tiny_model("llama"), args=args, train_dataset=data, callbacks=callbacks)


def logs(made: Trainer) -> list[dict[str, float]]:
    return [h for h in made.state.log_history if "loss" in h]


def same(a: Any, b: Any) -> bool:
    weights = all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))
    moments = all(torch.equal(x[k], y[k]) for x, y in zip(a[1], b[1], strict=True) for k in x)
    return weights and moments and a[2] == b[2]


def touched(made: Trainer) -> list[str]:
    """What of the guard is on the Trainer's objects."""
    owners = (made, made.accelerator, made.optimizer)
    placed = [(name, f) for owner in owners for name, f in vars(owner).items() if hasattr(f, "__code__")]
    return [name for name, f in placed if "guarding" in f.__code__.co_filename]


def untouched(made: Trainer) -> bool:
    """Nothing is."""
    return not touched(made)


def test_a_healthy_training_is_bit_identical(tmp_path: Path) -> None:
    runs = []
    for extra in ([], [GuardCallback(verbose=False)]):
        watch = Watch()
        made = trainer(tmp_path, [watch, *extra], max_grad_norm=0.5)
        made.train()
        runs.append((watch.seen, [(h["loss"], h["grad_norm"], h["learning_rate"]) for h in logs(made)]))
        assert untouched(made)
    assert all(same(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))
    assert runs[0][1] == runs[1][1]


@pytest.mark.parametrize("kind", ["nan_loss", "nan_gradient"])
@pytest.mark.parametrize(
    ("max_grad_norm", "bf16"),
    [(1.0, False), slow(1.0, True), slow(0.0, False), slow(0.0, True)],
)
def test_bad_batches_change_nothing(tmp_path: Path, kind: str, max_grad_norm: float, bf16: bool) -> None:
    watch = Watch()
    made = trainer(tmp_path, [GuardCallback(verbose=False), watch], max_grad_norm=max_grad_norm, bf16=bf16)
    setattr(made, kind, (2, 3))
    made.train()
    assert same(watch.seen[1], watch.seen[2])
    assert same(watch.seen[1], watch.seen[3])
    assert not same(watch.seen[3], watch.seen[4])
    assert watch.seen[-1][2] == 4, "the schedule took four steps of six"
    assert all(p.isfinite().all() for p in made.model.parameters())
    shown = logs(made)
    assert [h["guard/skipped"] for h in shown] == [0, 0, 1, 2, 2, 2]
    assert [math.isnan(h["guard/loss_raw"]) for h in shown] == [kind == "nan_loss" and i in (2, 3) for i in range(6)]
    assert [math.isnan(h["guard/norm"]) for h in shown] == [i in (2, 3) for i in range(6)]
    assert ["guard/loss" in h for h in shown] == [i not in (2, 3) for i in range(6)]
    reason = "guard/skipped_loss" if kind == "nan_loss" else "guard/skipped_gradients"
    assert shown[-1][reason] == 2
    assert untouched(made)


def test_without_a_guard_one_nan_ruins_the_weights_and_the_log_says_zero(tmp_path: Path) -> None:
    made = trainer(tmp_path, [])
    made.nan_loss = (2,)
    made.train()
    assert logs(made)[-1]["loss"] == 0.0
    assert any(p.isnan().any() for p in made.model.parameters())


def test_labels_all_masked_are_told_from_nan(tmp_path: Path) -> None:
    made = trainer(tmp_path, [GuardCallback(verbose=False)], data=rows(tuple(range(ROWS))))
    before = [p.detach().clone() for p in made.model.parameters()]
    with pytest.raises(GuardStop, match=r"every one of 6 steps was skipped \(6 x no supervised token\): .* no weight"):
        made.train()
    last = logs(made)[-1]
    assert last["loss"] == 0.0
    assert last["guard/skipped_no_labels"] == last["guard/skipped"] == 6
    assert "guard/skipped_loss" not in last
    assert all(torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))


@pytest.mark.slow
def test_accumulation_counts_tokens_and_skips_whole_windows(tmp_path: Path) -> None:
    data = rows(masked=(1, 4))
    whole, parts = Watch(), Watch()
    guard = GuardCallback(verbose=False)
    first = trainer(tmp_path, [whole], data=data, per_device_train_batch_size=4, max_steps=4)
    second = trainer(
        tmp_path, [guard, parts], data=data, per_device_train_batch_size=1, gradient_accumulation_steps=4, max_steps=4
    )
    first.train()
    second.train()
    for a, b in zip(whole.seen[-1][0], parts.seen[-1][0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    raw = [h["guard/loss_raw"] for h in logs(second)]
    assert raw == pytest.approx([h["loss"] for h in logs(first)], rel=1e-3)
    assert logs(second)[-1]["guard/empty_micro_batches"] == 2
    watch = Watch()
    third = trainer(
        tmp_path, [GuardCallback(verbose=False), watch], per_device_train_batch_size=1, gradient_accumulation_steps=4,
        max_steps=3,
    )  # fmt: skip
    third.nan_loss = (1,)
    third.train()
    assert same(watch.seen[0], watch.seen[1])
    assert not same(watch.seen[1], watch.seen[2])


def test_it_stops_and_takes_everything_off(tmp_path: Path) -> None:
    made = trainer(tmp_path, [GuardCallback(max_skips=3, verbose=False)], max_steps=20)
    made.nan_loss = tuple(range(1, 20))
    with pytest.raises(GuardStop, match=r"3 steps in a row were skipped \(2 to 4\): 3 x non-finite loss"):
        made.train()
    assert all(p.isfinite().all() for p in made.model.parameters())
    assert untouched(made)


def test_an_exception_takes_everything_off_and_the_next_training_works(tmp_path: Path) -> None:
    class Failing(Poisoned):
        armed = True

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self.armed and self.state.global_step == 1:
                raise RuntimeError("out of memory, say")
            return super().compute_loss(*args, **kwargs)

    made = trainer(tmp_path, [GuardCallback(verbose=False)], cls=Failing)
    with pytest.raises(RuntimeError, match="say"):
        made.train()
    assert untouched(made)
    made.armed = False
    made.nan_loss = (2,)
    made.train()
    assert logs(made)[-1]["guard/skipped"] == 1
    assert untouched(made)


def test_another_trainer_is_left_alone(tmp_path: Path) -> None:
    inner = trainer(tmp_path / "inner", [])

    class Nested(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                inner.train()

    made = trainer(tmp_path, [GuardCallback(verbose=False), Nested()])
    made.train()
    assert "guard/skipped" in logs(made)[-1]
    assert "guard/skipped" not in logs(inner)[-1]


def test_other_callbacks_and_reporters_see_the_figures(tmp_path: Path) -> None:
    class Reporter(TrainerCallback):
        got: list[dict[str, float]] = []  # noqa: RUF012 - shared on purpose

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            self.got.append(dict(logs))

    made = trainer(tmp_path, [Reporter(), GuardCallback(verbose=False)], max_steps=2, logging_steps=2)
    made.train()
    assert {"guard/loss_raw", "guard/loss", "guard/norm", "guard/skipped"} <= set(Reporter.got[0])


@pytest.mark.need(
    "checkpoints with the scaler's state, exact resume",
    "some lines",
    "`guard.state_dict()` beside those of optimizer, schedule and scaler; with the Trainer the callback does it",
)
def test_a_checkpoint_carries_the_state_and_resume_is_bit_identical(tmp_path: Path) -> None:
    whole, first, second = Watch(), Watch(), Watch()
    arguments: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    one = trainer(tmp_path / "one", [GuardCallback(verbose=False), whole], **arguments)
    one.nan_loss = (1, 4)
    one.train()
    saved = json.loads((tmp_path / "one" / "checkpoint-3" / "trainer_state.json").read_text())
    kept = saved["stateful_callbacks"]["GuardCallback"]["attributes"]["saved"]
    assert (kept["steps"], kept["skips"], kept["good_steps"]) == (3, {"LOSS": 1}, 2)
    two = trainer(tmp_path / "two", [GuardCallback(verbose=False), second], **arguments)
    two.nan_loss = (1, 4)
    two.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-3"))
    assert len(second.seen) == 3
    assert all(same(a, b) for a, b in zip(whole.seen[3:], second.seen, strict=True))
    assert logs(two)[-1]["guard/skipped"] == 2
    assert two.callback_handler.callbacks[-1] is not first


def test_an_optimizer_that_cannot_train_is_refused_before_the_first_step(tmp_path: Path) -> None:
    made = trainer(tmp_path, [GuardCallback(verbose=False)])
    made.model.half()
    with pytest.raises(InputError, match=r"eps=1e-08 .*torch\.float16"):
        made.train()
    assert untouched(made)
    with pytest.raises(InputError, match="no Trainer is calling"):
        GuardCallback().on_train_begin(made.args, made.state, made.control)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_under_a_grad_scaler_an_overflow_is_ordinary_and_a_bad_batch_is_not(tmp_path: Path, optim: str) -> None:
    watch = Watch()
    made = trainer(tmp_path, [GuardCallback(verbose=False), watch], optim=optim, max_steps=8)
    made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)  # overflows until it has fallen
    made.nan_loss = (6,)
    made.train()
    shown = logs(made)
    overflows = int(shown[5]["guard/overflows"])
    assert 1 <= overflows < 6
    assert made.accelerator.scaler.get_scale() == 2.0 ** (127 - overflows - 1)
    assert [h["guard/skipped"] for h in shown] == [0] * 6 + [1, 1]
    assert same(watch.seen[5], watch.seen[6])
    assert watch.seen[-1][2] == 8 - overflows - 1, "fused or not, the schedule waits"
    taken = [h["guard/norm"] for h in shown if "guard/loss" in h]
    assert len(taken) == 8 - overflows - 1
    assert all(0.1 < n < 100 for n in taken), "norms are unscaled"


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_backward_of_the_callers_own_is_refused_before_the_first_step(tmp_path: Path, accumulation: int) -> None:
    class Own(Poisoned):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
            loss.backward()
            return loss.detach()

    guard = GuardCallback(black_box=BlackBox(tmp_path / "box"))
    made = trainer(tmp_path, [guard], cls=Own, gradient_accumulation_steps=accumulation)
    before = [p.detach().clone() for p in made.model.parameters()]
    with pytest.raises(InputError, match=r"call self\.accelerator\.backward\(loss\) instead of loss\.backward\(\)"):
        made.train()
    assert all(torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))
    assert untouched(made)
    assert guard.recorder is None
    assert not any(h for m in made.model.modules() for h in m._forward_pre_hooks.values()), "nothing is collected on"


def test_parameters_that_join_the_optimizer_in_training_are_judged(tmp_path: Path) -> None:
    class Thaw(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                norm = kwargs["model"].model.norm.weight.requires_grad_(True)
                kwargs["optimizer"].optimizer.add_param_group({"params": [norm]})

    class Late(Poisoned):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            return loss + (model.model.norm.weight * 0).sum().sqrt() if self.state.global_step == 3 else loss

    made = trainer(tmp_path, [GuardCallback(verbose=False), Thaw()], cls=Late)
    made.model.model.norm.weight.requires_grad_(False)
    made.create_optimizer()
    made.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(made.optimizer, 1.0)
    made.train()
    assert all(p.isfinite().all() for p in made.model.parameters())
    assert logs(made)[-1]["guard/skipped_gradients"] == 1


def test_a_head_trained_alone_under_a_scaler(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = trainer(tmp_path, [GuardCallback()], max_steps=3)
    head = torch.optim.AdamW(made.model.model.norm.parameters(), lr=1e-3)
    made.optimizer, made.lr_scheduler = head, torch.optim.lr_scheduler.ConstantLR(head, 1.0)
    made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    made.train()
    assert logs(made)[-1]["guard/skipped"] == 0
    assert all(h["guard/norm"] < 100 for h in logs(made))
    assert "38 parameters of LlamaForCausalLM require gradients and are not in AdamW" in capfd.readouterr().err


def test_a_loss_that_is_rightly_0_does_not_stop_a_trainer(tmp_path: Path) -> None:
    class Indifferent(Poisoned):  # as with rewards that are all equal
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            return loss * 0.0 if self.state.global_step < 4 else loss

    made = trainer(tmp_path, [GuardCallback(max_skips=3, verbose=False)], cls=Indifferent)
    made.train()
    last = logs(made)[-1]
    assert (last["guard/skipped"], last["guard/skipped_zero"]) == (4, 4)
    assert last["guard/loss"] > 0


@pytest.mark.slow
def test_an_empty_micro_batch_is_not_in_the_mean_of_the_steps_taken(tmp_path: Path) -> None:
    """A model that averages its own loss: 0 / 0 for the micro-batch without labels."""
    shown = []
    for masked in ((1, 4), ()):
        made = trainer(
            tmp_path, [GuardCallback(verbose=False)], data=rows(masked), per_device_train_batch_size=1,
            gradient_accumulation_steps=4, max_steps=4, learning_rate=0.0,
        )  # fmt: skip
        made.model.accepts_loss_kwargs = False
        made.model_accepts_loss_kwargs = False
        made.train()
        shown.append(logs(made))
    assert [math.isnan(h["guard/loss_raw"]) for h in shown[0]].count(True) in (1, 2)
    for some, whole in zip(*shown, strict=True):
        assert some["guard/loss"] == pytest.approx(whole["guard/loss"], rel=0.05), "no share is missing"
    assert shown[0][-1]["guard/empty_micro_batches"] == 2


@pytest.mark.parametrize("moment", ["on_train_begin", slow("on_epoch_begin")])
def test_another_callback_that_raises_leaves_nothing_at_work(tmp_path: Path, moment: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyError("boom")

    guard = GuardCallback(verbose=False, black_box=BlackBox(tmp_path / "box"))
    failing = TrainerCallback()
    setattr(failing, moment, fail)
    made = trainer(tmp_path, [guard, failing])
    with pytest.raises(KeyError, match="boom"):
        made.train()
    assert touched(made) == ["_run_epoch"], "which does nothing for a callback that was taken out"
    assert guard.recorder is None
    made.remove_callback(guard)
    made.remove_callback(failing)
    made.nan_loss = (2,)
    made.train()
    assert untouched(made)
    assert "guard/skipped" not in logs(made)[-1]


def test_two_ranks_decide_alike(tmp_path: Path) -> None:
    found = launch("trainer", 2, tmp_path)
    assert found[0] == found[1]
    assert found[0]["skipped"] == [0, 1, 1, 2, 2]
    assert found[0]["finite"]
