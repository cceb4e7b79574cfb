"""The black box at work: what a guard records, that training does not feel it, and what it says when a run stops."""

from __future__ import annotations

import copy
import gc
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import BertConfig, BertForSequenceClassification
from transformers.cache_utils import DynamicCache

from hfpatch.blackbox import BlackBox, Bundle, read_bundle
from hfpatch.errors import GuardStop, InputError
from hfpatch.guarding.callback import GuardCallback
from hfpatch.guarding.guard import Guard
from hfpatch.lab.tiny import rescale, tiny_model
from tests.fingerprint import fingerprint
from tests.sampling import first_quick
from tests.test_guard import everything
from tests.test_guard_trainer import Watch as Weights
from tests.test_guard_trainer import rows, same, trainer, untouched
from tests.test_trace import Do

NAN = math.nan


def llama(act: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    """A tiny decoder in training mode; with `act`, the activation of its second layer is that function."""
    model: Any = tiny_model("llama").train()
    if act is not None:
        model.model.layers[1].mlp.act_fn = Do(act)
    return model


def guarded(model: nn.Module, box: BlackBox | None, **options: Any) -> Guard:
    fused = options.pop("fused", False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=fused)
    return Guard(model, optimizer, black_box=box, **{"explode_at": None, "verbose": False, **options})


def bundles(directory: Path) -> list[Bundle]:
    return [read_bundle(path) for path in sorted(directory.iterdir())]


def embedded(model: Any, ids: torch.Tensor, value: float | None = None) -> dict[str, torch.Tensor]:
    """A batch of embeddings, of which one element is `value`."""
    inputs = model.get_input_embeddings()(ids).detach().clone()
    if value is not None:
        inputs[0, 3, 2] = value
    return {"inputs_embeds": inputs, "labels": ids}


def masked(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "labels": torch.full_like(ids, -100)}


def plain(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "labels": ids}


def overflowing() -> Any:
    model: Any = tiny_model("gemma3_text").train()
    rescale(model, {}, {"*post_feedforward_layernorm.weight": 24000.0})
    return model.half()


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Tensor], Any], tuple[str, str, str]]] = {
    "NaN in the batch": (llama, lambda m, i: embedded(m, i, NAN), ("forward", "", "bad-input")),
    "no labels": (llama, masked, ("forward", "", "no-labels")),
    "overflow": (overflowing, plain, ("forward", "model.layers.1", "residual-overflow")),
    "backward only": (
        lambda: llama(lambda x: (x * 0).abs().sqrt()),
        plain,
        ("backward", "model.layers.1.mlp.act_fn", "division-by-zero"),
    ),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("on_device", first_quick([False, True]))
def test_a_bad_batch_is_recorded_and_its_bundle_reproduces_the_finding(
    kind: str, on_device: bool, tmp_path: Path, ids: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    make, batch, (phase, module, symptom) = CASES[kind]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=on_device)
    guard = Guard(model, optimizer, explode_at=None, on_device=on_device, black_box=BlackBox(tmp_path))
    inputs = batch(model, ids)
    loss = model(**inputs).loss
    before, random = fingerprint(model), torch.get_rng_state()
    outcome = guard.step(loss)
    assert outcome.skipped
    assert fingerprint(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    (bundle,) = bundles(tmp_path)
    found = bundle.finding
    assert found is not None
    assert (found["phase"], found["module"], found["symptom"], found["step"]) == (phase, module, symptom, 1)
    assert bundle.about["replay"]["exact"] is True
    again = bundle.replay(model)
    assert again.finding is not None
    assert bundle.reproduced(again)
    assert fingerprint(model) == before
    told = capsys.readouterr().err
    assert f"hfpatch replay {bundle.path} --model DIR" in told
    if kind == "overflow":
        assert "tried on this call: finite: hfpatch.apply(model, only=['fp16-residual-overflow'])" in told


def test_what_a_bundle_says(tmp_path: Path, ids: torch.Tensor) -> None:
    model = llama()
    guard = guarded(model, BlackBox(tmp_path), scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    for _ in range(3):
        guard.step(model(**plain(model, ids)).loss)
    guard.step(model(**embedded(model, ids, NAN)).loss)
    (bundle,) = bundles(tmp_path)
    about = bundle.about
    assert bundle.path.name == "step-00000004-rank0"
    assert about["event"]["reason"] == "non-finite loss"
    assert [w["kind"] for w in about["recent"]] == ["stepped"] * 3 + ["skipped"]
    assert all(math.isfinite(w["loss"]) and w["norm"] > 0 for w in about["recent"][:3])
    assert about["recent"][3]["loss"] == "nan", "strict JSON"
    assert about["counts"]["guard/skipped"] == 1
    assert about["scaler"]["scale"] == 4.0, "lowered by the bad batch"
    assert about["event"]["scale"] == 8.0
    assert about["software"]["torch"] == torch.__version__.partition("+")[0] or about["software"]["torch"]
    assert bundle.patches == ()
    assert bundle.model["class"] == "LlamaForCausalLM"
    assert bundle.model["dtype"] == "float32"
    assert set(bundle.tensors) == {"kwargs.inputs_embeds", "kwargs.labels"}
    assert torch.equal(bundle.tensors["kwargs.labels"], ids)


def test_the_same_dropout_is_drawn_and_the_run_goes_on_as_if_nothing_had_been(
    tmp_path: Path, ids: torch.Tensor
) -> None:
    drawn: list[torch.Tensor] = []

    def mask(x: torch.Tensor) -> torch.Tensor:
        kept = nn.functional.dropout(torch.ones_like(x), 0.5)
        drawn.append(kept.clone())
        return x * kept

    ends = []
    for box in (None, BlackBox(tmp_path)):
        torch.manual_seed(3)
        drawn.clear()
        model = llama(mask)
        guard = guarded(model, box)
        for step in range(5):
            batch = embedded(model, ids, NAN) if step == 2 else plain(model, ids)
            assert guard.step(model(**batch).loss).skipped == (step == 2)
            if step == 2 and box is not None:
                assert len(drawn) > 3
                assert all(torch.equal(drawn[2], again) for again in drawn[3:])
        ends.append((everything(model, guard.optimizer), torch.get_rng_state()))
    assert ends[0][0] == ends[1][0]
    assert torch.equal(ends[0][1], ends[1][1])
    drawn.clear()
    bundle = bundles(tmp_path)[0]
    first = bundle.replay(model)
    bundle.replay(model)
    assert first.finding is not None
    assert torch.equal(drawn[0], drawn[-1]), "the bundle brings the random numbers along"


class TestWindows:
    def test_the_bad_micro_batch_is_found_by_its_loss(self, tmp_path: Path, ids: torch.Tensor) -> None:
        model = llama()
        guard = guarded(model, BlackBox(tmp_path), accumulation_steps=4)
        for index in range(4):
            guard.step(model(**embedded(model, ids + index, NAN if index == 2 else None)).loss)
        (bundle,) = bundles(tmp_path)
        assert bundle.about["replay"]["micro_batch"] == 2
        assert torch.equal(bundle.tensors["kwargs.labels"], ids + 2)

    def test_or_by_its_gradients(self, tmp_path: Path, ids: torch.Tensor) -> None:
        """The loss is finite in all; one has a row of zeros where a root is taken."""
        model = llama()
        root = Do(lambda x: x.abs().sqrt())
        model.model.embed_tokens = nn.Sequential(model.model.embed_tokens, root)
        with torch.no_grad():
            model.model.embed_tokens[0].weight[63] = 0.0
        guard = guarded(model, BlackBox(tmp_path), accumulation_steps=3)
        for index in range(3):
            inputs = (ids % 50).clone()
            inputs[0, 0] = 63 if index == 1 else 1
            outcome = guard.step(model(input_ids=inputs, labels=inputs).loss)
        assert outcome.skipped
        (bundle,) = bundles(tmp_path)
        assert bundle.about["replay"]["micro_batch"] == 1
        assert bundle.finding is not None
        assert (bundle.finding["phase"], bundle.finding["symptom"]) == ("backward", "division-by-zero")

    def test_an_explosion_has_no_finding_but_a_norm_that_is_the_same(self, tmp_path: Path, ids: torch.Tensor) -> None:
        model = llama()
        guard = guarded(model, BlackBox(tmp_path), explode_at=1e-9, max_grad_norm=None)
        outcome = guard.step(model(**plain(model, ids)).loss * 3)
        assert outcome.skipped
        (bundle,) = bundles(tmp_path)
        replay = bundle.about["replay"]
        assert replay["finding"] is None
        assert replay["factor"] == pytest.approx(3.0)
        assert replay["norm"] == pytest.approx(outcome.facts.norm)
        again = bundle.replay(model)
        assert again.norm == pytest.approx(outcome.facts.norm)
        assert again.loss == pytest.approx(replay["loss"])

    def test_calls_without_gradients_are_no_part_of_it(self, tmp_path: Path, ids: torch.Tensor) -> None:
        model = llama()
        guard = guarded(model, BlackBox(tmp_path))
        loss = model(**embedded(model, ids, NAN)).loss
        with torch.no_grad():
            model(input_ids=ids)
        guard.step(loss)
        assert set(bundles(tmp_path)[0].tensors) == {"kwargs.inputs_embeds", "kwargs.labels"}

    def test_nothing_is_held_after_a_good_step(self, tmp_path: Path, ids: torch.Tensor) -> None:
        import weakref

        model = llama()
        for on_device in (False, True):
            guard = guarded(model, BlackBox(tmp_path), fused=True, on_device=on_device)
            batch = embedded(model, ids)
            held = weakref.ref(batch["inputs_embeds"])
            outcome = guard.step(model(**batch).loss)
            del batch
            guard.settle()
            gc.collect()
            assert outcome.stepped
            assert held() is None


class TestWhatCannotBeReplayed:
    def test_a_loss_computed_outside(self, tmp_path: Path, ids: torch.Tensor) -> None:
        model = llama()
        guard = guarded(model, BlackBox(tmp_path))
        guard.step(model(input_ids=ids).logits.square().mean() * NAN)
        (bundle,) = bundles(tmp_path)
        assert bundle.finding is None
        assert "returns no loss, so the loss and the backward pass were not run again" in bundle.says

    def test_a_loss_spoiled_outside(self, tmp_path: Path, ids: torch.Tensor) -> None:
        model = llama()
        guard = guarded(model, BlackBox(tmp_path))
        guard.step(model(**plain(model, ids)).loss * NAN)
        assert "no operation goes wrong" in bundles(tmp_path)[0].says
        assert "the cause is outside the model" in bundles(tmp_path)[0].says

    def test_a_batch_that_was_overwritten(self, tmp_path: Path, ids: torch.Tensor) -> None:
        model = llama()
        guard = guarded(model, BlackBox(tmp_path))
        batch = embedded(model, ids, NAN)
        loss = model(**batch).loss
        batch["inputs_embeds"].zero_()
        guard.step(loss)
        (bundle,) = bundles(tmp_path)
        assert "overwritten in place" in bundle.says
        assert bundle.about["batch"]["left_out"] == "it was overwritten in place"
        with pytest.raises(InputError, match="holds no batch, so it cannot be replayed: it was overwritten"):
            bundle.replay(model)

    def test_a_cache_among_the_arguments(self, tmp_path: Path, ids: torch.Tensor) -> None:
        model = llama()
        guard = guarded(model, BlackBox(tmp_path))
        cache = DynamicCache(config=model.config)
        guard.step(model(**embedded(model, ids, NAN), past_key_values=cache).loss)
        with pytest.raises(
            InputError, match=r"its argument kwargs\.past_key_values was a DynamicCache, which a bundle does not"
        ):
            bundles(tmp_path)[0].replay(model)

    def test_weights_that_a_step_ruined(self, tmp_path: Path, ids: torch.Tensor) -> None:
        """The weights were changed after the batch: said, and the finding names the first of them."""
        model = llama()
        guard = guarded(model, BlackBox(tmp_path))
        guard.optimizer.param_groups[0]["lr"] = math.inf
        with pytest.raises(GuardStop) as stop:
            guard.step(model(**plain(model, ids)).loss)
        (bundle,) = bundles(tmp_path)
        assert bundle.about["replay"]["exact"] is False
        assert bundle.about["replay"]["doubts"] == ["the weights were changed after the batch"]
        assert bundle.finding is not None
        assert bundle.finding["symptom"] == "bad-weight"
        assert str(stop.value).endswith(f"next: hfpatch replay {bundle.path} --model DIR")

    def test_a_model_compiled_in_place(self, tmp_path: Path, ids: torch.Tensor) -> None:
        model = llama()
        guard = guarded(model, BlackBox(tmp_path))
        model.compile(backend="eager", fullgraph=True)
        guard.step(model(**plain(model, ids)).loss * NAN)
        (bundle,) = bundles(tmp_path)
        assert "no call of the model was seen" in bundle.says
        torch.compiler.reset()

    def test_a_wrapped_compiled_model_is_replayed(self, tmp_path: Path, ids: torch.Tensor) -> None:
        model = llama()
        compiled: Any = torch.compile(model, backend="eager")
        guard = guarded(compiled, BlackBox(tmp_path))
        guard.step(compiled(**embedded(model, ids, NAN)).loss)
        (bundle,) = bundles(tmp_path)
        assert bundle.finding is not None
        assert bundle.finding["symptom"] == "bad-input"
        torch.compiler.reset()


class TestStops:
    def test_after_k_skips_the_message_ends_with_what_to_do_next(
        self, tmp_path: Path, ids: torch.Tensor, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = overflowing()
        guard = guarded(model, BlackBox(tmp_path), max_skips=3)
        with pytest.raises(GuardStop) as stop:
            for _ in range(9):
                guard.step(model(**plain(model, ids)).loss)
        *_, found, patch, last = str(stop.value).splitlines()
        assert "residual add in model.layers.1" in found
        assert patch == "tried on this call: finite: hfpatch.apply(model, only=['fp16-residual-overflow'])"
        path = last.removeprefix("next: hfpatch replay ").removesuffix(" --model DIR")
        assert read_bundle(path).step == 3
        assert [b.step for b in bundles(tmp_path)] == [1, 2, 3]
        assert read_bundle(path).about["event"]["stop"].startswith("guard: 3 steps in a row were skipped")
        assert capsys.readouterr().err == "", "verbose=False"

    def test_without_a_box_it_names_the_box(self, ids: torch.Tensor) -> None:
        model = llama()
        guard = guarded(model, None, max_skips=1)
        with pytest.raises(GuardStop) as stop:
            guard.step(model(**plain(model, ids)).loss * NAN)
        assert str(stop.value).splitlines()[-1].startswith("next: pass black_box=hfpatch.BlackBox(DIR)")

    def test_an_ordinary_overflow_of_the_scale_is_no_event(self, tmp_path: Path, ids: torch.Tensor) -> None:
        model = llama(lambda x: (x * 0).abs().sqrt())
        guard = guarded(model, BlackBox(tmp_path), scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
        assert guard.step(model(**plain(model, ids)).loss).skipped
        assert bundles(tmp_path) == []
        for _ in range(3):
            guard.step(model(**plain(model, ids)).loss)
        (bundle,) = bundles(tmp_path)
        assert bundle.about["event"]["reason"] == "loss scale collapsed"

    def test_each_reason_is_recorded_so_often_and_the_stop_always(self, tmp_path: Path, ids: torch.Tensor) -> None:
        model = llama()
        guard = guarded(model, BlackBox(tmp_path, max_bundles=2), max_skips=5)
        with pytest.raises(GuardStop):
            for _ in range(9):
                guard.step(model(**embedded(model, ids, NAN)).loss)
        assert [b.step for b in bundles(tmp_path)] == [1, 5], "the first and the newest"


class TestTheModelStays:
    def test_batch_norm_and_modules_in_another_mode(self, tmp_path: Path) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm, self.frozen = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
                self.out = nn.Linear(4, 1)

            def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"loss": self.out(self.frozen(self.norm(x))).log().mean()}

        torch.manual_seed(0)
        model = Net().train()
        model.frozen.eval()
        guard = guarded(model, BlackBox(tmp_path))
        loss = model(torch.randn(8, 4))["loss"]
        before = fingerprint(model)
        assert guard.step(loss).skipped
        assert fingerprint(model) == before
        (bundle,) = bundles(tmp_path)
        assert bundle.finding is not None
        assert bundle.finding["symptom"] == "out-of-domain"
        assert bundle.about["call"]["otherwise"] == ["frozen"]
        model.eval()
        assert bundle.reproduced(bundle.replay(model))
        assert not any(m.training for m in model.modules())

    def test_gradients_that_wait_and_hooks_on_parameters(self, tmp_path: Path, ids: torch.Tensor) -> None:
        """Decided on the device, the next window's gradients are there already; nor does an optimizer in a hook run."""
        model = llama()
        guard = guarded(model, BlackBox(tmp_path), fused=True, on_device=True)
        outcome = guard.step(model(**embedded(model, ids, NAN)).loss)
        ran: list[str] = []
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: ran.append(name))
        model(**plain(model, ids)).loss.backward()
        grads = [p.grad for p in model.parameters()]
        values = [g.clone() for g in grads]
        ran.clear()
        assert outcome.skipped
        assert len(bundles(tmp_path)) == 1
        assert ran == []
        assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
        assert all(torch.equal(g, v) for g, v in zip(grads, values, strict=True))

    def test_copies_and_pickles_are_not_followed(self, tmp_path: Path, ids: torch.Tensor) -> None:
        model = nn.Sequential(nn.Linear(2, 1))
        guard = guarded(model, BlackBox(tmp_path))
        pickled = pickle.dumps(model)
        for twin in (copy.deepcopy(model), pickle.loads(pickled)):  # noqa: S301 - ours
            assert twin(torch.ones(1, 2)).shape == (1, 1)
        guard.step(model(torch.full((1, 2), NAN)).sum())
        (bundle,) = bundles(tmp_path)
        assert bundle.about["replay"]["micro_batches"] == 1
        assert bundle.finding is not None

    def test_a_hook_outlives_its_guard_and_does_nothing(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(2, 1))
        guard = guarded(model, BlackBox(tmp_path))
        recorder = guard.recorder
        assert recorder is not None
        recorder.detach()
        assert not model._forward_pre_hooks
        guard = guarded(model, BlackBox(tmp_path))
        del guard, recorder
        gc.collect()
        assert model(torch.ones(1, 2)).shape == (1, 1)


def test_a_box_that_fails_stops_no_training(
    tmp_path: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("no such view of an odd tensor")

    model = llama()
    guard = guarded(model, BlackBox(tmp_path), max_skips=2, verbose=True)
    monkeypatch.setattr("hfpatch.blackbox.box.account", broken)
    assert guard.step(model(**embedded(model, ids, NAN)).loss).skipped
    assert "black box: step 1 was not recorded: NotImplementedError: no such view" in capsys.readouterr().err
    with pytest.raises(GuardStop, match="step 2 was not recorded"):
        guard.step(model(**embedded(model, ids, NAN)).loss)
    assert list(tmp_path.iterdir()) == []


def test_private_data_stay_out(tmp_path: Path, ids: torch.Tensor) -> None:
    model = llama()
    guard = guarded(model, BlackBox(tmp_path, keep_batch=False))
    guard.step(model(**embedded(model, ids, NAN), output_hidden_states=False).loss)
    (bundle,) = bundles(tmp_path)
    assert [p.name for p in bundle.path.iterdir()] == ["bundle.json"]
    described = bundle.about["arguments"]["kwargs"]["of"]
    assert described["labels"]["shape"] == [2, 12]
    assert described["output_hidden_states"] == {"is": "absent", "of": "bool"}
    assert bundle.finding is not None, "it was run again at the spot"
    with pytest.raises(InputError, match="holds no batch, so it cannot be replayed: keep_batch=False"):
        bundle.replay(model)


def test_accelerates_autocast_is_seen_inside_the_model(tmp_path: Path, ids: torch.Tensor) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = llama()
    raw = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    guard = Guard(model, optimizer, accelerator=accelerator, verbose=False, black_box=BlackBox(tmp_path))
    guard.step(model(**embedded(raw, ids, NAN)).loss)
    (bundle,) = bundles(tmp_path)
    assert bundle.about["call"]["autocast"] == {"cpu": "bfloat16"}
    assert bundle.reproduced(bundle.replay(raw))


@pytest.mark.slow
class TestTrainer:
    def test_a_healthy_training_is_bit_identical_and_nothing_stays(self, tmp_path: Path) -> None:
        runs = []
        for box in (None, BlackBox(tmp_path / "box")):
            watch = Weights()
            made = trainer(tmp_path, [watch, GuardCallback(verbose=False, black_box=box)])
            made.train()
            runs.append(watch.seen)
            assert untouched(made)
            assert not made.model._forward_pre_hooks
        assert all(same(a, b) for a, b in zip(*runs, strict=True))
        assert list((tmp_path / "box").iterdir()) == []

    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_a_planted_fault_is_recorded_and_training_goes_on(self, tmp_path: Path, accumulation: int) -> None:
        """One token's embedding overflows; one row of the data holds it."""
        data = rows()
        data[5]["input_ids"] = [63, *data[5]["input_ids"][1:]]
        made = trainer(
            tmp_path,
            [GuardCallback(verbose=False, explode_at=None, spike_at=None, black_box=BlackBox(tmp_path / "box"))],
            data=data,
            gradient_accumulation_steps=accumulation,
            max_steps=8 // accumulation,
        )
        made.model.model.embed_tokens.register_forward_hook(
            lambda _m, args, out: out * 1e39 if bool((args[0] == 63).any()) else out
        )
        made.train()
        assert all(p.isfinite().all() for p in made.model.parameters())
        (bundle,) = bundles(tmp_path / "box")
        assert bundle.finding is not None
        assert bool((bundle.tensors["kwargs.input_ids"] == 63).any())
        assert bundle.reproduced(bundle.replay(made.model))

    def test_k_skips_stop_the_training_with_a_path(self, tmp_path: Path) -> None:
        box = BlackBox(tmp_path / "box")
        made = trainer(tmp_path, [GuardCallback(verbose=False, max_skips=2, black_box=box)])
        made.nan_loss = tuple(range(9))
        with pytest.raises(GuardStop) as stop:
            made.train()
        last = str(stop.value).splitlines()[-1]
        assert last == f"next: hfpatch replay {tmp_path / 'box' / 'step-00000002-rank0'} --model DIR"
        assert untouched(made)

    def test_a_callback_made_anew_says_that_its_box_is_lost(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
        trainer(tmp_path, [GuardCallback(verbose=False, black_box=BlackBox(tmp_path / "box"))], **options).train()
        capsys.readouterr()
        again = trainer(
            tmp_path,
            [GuardCallback(verbose=False, black_box=BlackBox(tmp_path / "box"))],
            restore_callback_states_from_checkpoint=True,
            max_steps=3,
        )
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert "has recreated the GuardCallback without its black box" in capsys.readouterr().err


def test_an_encoder_with_its_own_head(tmp_path: Path, ids: torch.Tensor) -> None:
    config = BertConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    model = BertForSequenceClassification(config).train()
    guard = guarded(model, BlackBox(tmp_path))
    embeds = model.get_input_embeddings()(ids).detach().clone()
    embeds[1, 0, 0] = math.inf
    guard.step(model(inputs_embeds=embeds, labels=torch.tensor([0, 1]), return_dict=False)[0])
    (bundle,) = bundles(tmp_path)
    assert bundle.about["replay"]["loss"] == "nan", "the first of a tuple"
    assert bundle.reproduced(bundle.replay(model))
