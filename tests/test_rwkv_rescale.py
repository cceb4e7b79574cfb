"""RWKV with adapters on the maps that evaluation divides."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from peft import get_peft_model

import hfpatch
from hfpatch.lab.tiny import tiny_model
from hfpatch.patching.status import status
from tests import interrupts
from tests.fingerprint import fingerprint
from tests.sampling import first_quick

ID = "rwkv-rescale"
IDS = torch.arange(16).reshape(2, 8) * 3 % 64


def plain(every: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    return tiny_model("rwkv", rescale_every=every, attention_hidden_size=32).to(dtype)  # type: ignore[call-arg, arg-type]


def adapted(model: Any) -> Any:
    """Adapters on every map of the blocks, their B not 0."""
    from peft import LoraConfig

    lora = get_peft_model(model, LoraConfig(r=2, target_modules=["output", "value", "key", "receptance"]))
    torch.manual_seed(1)
    for name, parameter in lora.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return lora


def logits(model: Any, *, train: bool = False) -> torch.Tensor:
    with torch.no_grad():
        return model.train(train)(IDS).logits.float()


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("evaluated", [False, True], ids=["not divided yet", "divided"])
@pytest.mark.parametrize("every", first_quick([2, 1, 3]))
def test_evaluation_is_training_with_the_patch(every: int, evaluated: bool, dtype: torch.dtype) -> None:
    model = adapted(plain(every, dtype))
    checkpoint = weights(model)
    trained = logits(model, train=True)
    stock = logits(model)
    assert (trained - stock).abs().max() > 1e-2
    if not evaluated:
        logits(model, train=True)
    model.eval()
    now, before = weights(model), fingerprint(model)
    fix = hfpatch.apply(model, only=ID, verbose=False)
    assert all(torch.equal(p, checkpoint[n]) for n, p in model.named_parameters())  # at once, not at the next call
    assert torch.equal(logits(model), trained)
    assert torch.equal(logits(model, train=True), trained)
    model.eval()
    fix.revert()
    assert fingerprint(model) == before
    assert all(torch.equal(p, now[n]) for n, p in model.named_parameters())
    assert torch.equal(logits(model), stock)


def test_what_was_trained_while_it_was_applied_is_divided_too() -> None:
    model = adapted(plain())
    logits(model)
    fix = hfpatch.apply(model, only=ID, verbose=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    want = logits(model, train=True)
    assert {e.state.word for e in status(model, compare=True).edits} == {"here"}
    model.eval()
    fix.revert()
    assert torch.equal(logits(model, train=True), want)


def test_copies_revert_alone() -> None:
    model = adapted(plain())
    stock = logits(model)
    fix = hfpatch.apply(model, only=ID, verbose=False)
    want = logits(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert torch.equal(logits(other), want)
        assert {*hfpatch.status(other).patches} == {ID}
        hfpatch.revert(other)
        assert torch.equal(logits(other), stock)
    assert torch.equal(logits(model), want)
    fix.revert()


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 2, 3, 4, 5])
def test_an_interruption_is_cleaned_by_the_next_revert(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are multiplied in place, one after the other."""

    def divided() -> Any:
        model = adapted(plain())
        logits(model)
        return model

    monkeypatch.setitem(interrupts.SUBJECTS, "scaled tensor", interrupts.Subject(divided, ID))
    found = list(interrupts.trials("scaled tensor", every=29, first=first * 5))
    assert len(found) > 5
    assert [(where, left) for where, left in found if left] == []


class TestTargets:
    @staticmethod
    def of(model: Any) -> tuple[set[str], dict[str, str]]:
        targets = hfpatch.lora_targets(model)
        return set(targets.modules), {o.path: o.reason for o in targets.left_out}

    def test_left_out_with_the_patch_to_apply_and_back_with_it(self) -> None:
        model = plain(every=2)
        maps, out = self.of(model)
        assert {p for p in maps if p.endswith(("output", "ward.value"))} == {
            f"rwkv.blocks.{i}.{name}" for i in (0, 1) for name in ("attention.output", "feed_forward.value")
        }
        assert set(out) == {"rwkv.blocks.*.attention.output", "rwkv.blocks.*.feed_forward.value"}
        assert all(ID in reason and "divides its weight by 2" in reason for reason in out.values())
        (offered,) = (d for d in hfpatch.plan(model).decisions if d.patch == ID)
        assert offered.decided == "opt-in"
        hfpatch.apply(model, include=ID, verbose=False)
        maps, out = self.of(model)
        assert len(maps) == 4 * 7
        assert not out

    @pytest.mark.parametrize("every", [0, 4, 6])
    def test_nothing_is_left_out_where_nothing_is_divided(self, every: int) -> None:
        assert not self.of(plain(every))[1]

    def test_what_lora_config_adapts_is_the_same_in_both(self) -> None:
        model = plain(every=2)
        lora = get_peft_model(model, hfpatch.lora_config(model, r=2, verbose=False))
        with torch.no_grad():
            for name, parameter in lora.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.3)
        assert (logits(lora, train=True) - logits(lora)).abs().max() < 2e-3  # eps of the norms


class TestFloat16:
    def test_refused_without_a_batch(self) -> None:
        decision = hfpatch.plan(adapted(plain(dtype=torch.float16)), only=ID).decisions[0]
        assert decision.decided == "refused"
        assert "plan(batch=)" in decision.reason

    @pytest.mark.parametrize(("scale", "decided"), [(1.0, "applied"), (3e4, "refused")])
    def test_a_batch_decides(self, scale: float, decided: str) -> None:
        model = plain(every=2, dtype=torch.float16)
        with torch.no_grad():
            for block in model.rwkv.blocks:
                block.attention.output.weight.mul_(scale)
        model = adapted(model)
        now = weights(model)
        decision = hfpatch.plan(model, only=ID, batch={"input_ids": IDS}).decisions[0]
        assert decision.decided == decided
        assert ("would reach" in decision.reason) == (decided == "refused")
        assert all(torch.equal(p, now[n]) for n, p in model.named_parameters())  # a measuring run divides nothing

    def test_what_a_batch_measures_is_what_the_stream_reaches_undivided(self) -> None:
        from hfpatch.inspecting.peaks import peaks_of
        from hfpatch.model.evaluating.divided import undivided_peak
        from hfpatch.patching.verifying.need import measure

        model = adapted(plain(every=1))
        divided = undivided_peak(model.named_modules(), measure(model, {"input_ids": IDS}).values)
        hfpatch.apply(model, only=ID, verbose=False)
        with torch.no_grad(), peaks_of(model) as found:
            model.eval()(IDS)
        later = [float(v) for p, v in found.items() if p.rpartition(".")[0].endswith("rwkv.blocks") and p[-1] != "0"]
        assert divided >= max(later) / 2  # adapters on divided maps count more there


def test_verify_leaves_the_weights_alone_and_counts_adapters_as_training_does() -> None:
    model = adapted(plain())
    for run in (False, True):
        if run:
            logits(model)
        now, note = weights(model), model.base_model.model.rwkv.layers_are_rescaled
        rows = {r.name: r for r in hfpatch.verify(model, {"input_ids": IDS}).rows}
        assert rows["as it is"].kl > 1e-4
        assert all(torch.equal(p, now[n]) for n, p in model.named_parameters())
        assert model.base_model.model.rwkv.layers_are_rescaled is note
    rows = {r.name: r for r in hfpatch.apply(model, only=ID, verbose=False).verify({"input_ids": IDS}).rows}
    assert rows["before"].kl > 1e-4
    assert rows["after"].kl < 1e-9
