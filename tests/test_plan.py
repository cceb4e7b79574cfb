"""Names, options, decisions, conflicts, drift, all or nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING

import hfpatch
from hfpatch.errors import (
    ApplyError,
    ConflictError,
    InputError,
    NotAModelError,
    RefusedError,
    UnknownPatchError,
)
from hfpatch.lab.tiny import SpeechLLM
from hfpatch.model.source import build_on_meta
from hfpatch.patching import registry, select
from hfpatch.patching.kinds.cast_input import CastInput
from hfpatch.patching.kinds.cast_output import CastOutput
from hfpatch.patching.kinds.hook_change import HookChange
from hfpatch.patching.kinds.set_attribute import SetAttribute
from hfpatch.patching.language import Needed
from tests.fingerprint import fingerprint
from tests.test_registry import CARD


def decision(made: hfpatch.Plan, patch: str) -> Any:
    return next(d for d in made.decisions if d.patch == patch)


@pytest.mark.parametrize("given", [None, 3, "gpt2", {"model": 1}, nn.Module])
def test_what_is_no_model_is_refused(given: object) -> None:
    with pytest.raises(NotAModelError, match="want a torch module"):
        hfpatch.apply(given)


@pytest.mark.parametrize("word", ["only", "include", "exclude"])
def test_a_name_that_matches_nothing_lists_near_ones(word: str, gemma: Any) -> None:
    before = fingerprint(gemma)
    with pytest.raises(UnknownPatchError, match="did you mean fp16-residual-overflow"):
        hfpatch.apply(gemma, **{word: "fp16-residual"})
    assert fingerprint(gemma) == before


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"eps-aligment": {}}, "did you mean eps-alignment"),
        ({"eps-alignment": {"backbon": 1}}, "has no option 'backbon'; it has: backbone, modules"),
        ({"fp16-residual-overflow": {"x": 1}}, "it has: none"),
    ],
)
def test_unknown_options(options: Any, word: str, gemma: Any) -> None:
    with pytest.raises(InputError, match=word):
        hfpatch.plan(gemma, options=options)


@pytest.mark.parametrize("dtype", ["float17", "int8", 16, "float8_e4m3fn"])
def test_what_is_no_dtype(dtype: Any, gemma: Any) -> None:
    with pytest.raises(InputError, match="want float16, bfloat16, float32 or float64"):
        hfpatch.plan(gemma, compute_dtype=dtype)


@pytest.mark.parametrize("dtype", ["float16", "fp16", torch.float16])
def test_compute_dtype_plans_for_what_is_not_yet(dtype: Any, tiny: Any) -> None:
    made = hfpatch.plan(tiny("llama"), compute_dtype=dtype)
    found = decision(made, "fp16-residual-overflow")
    assert found.decided == "applied"
    assert "float32 and planned to be float16" in found.reason


def test_bf16_and_fp32_are_left_alone_and_the_alternatives_named(tiny: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert decision(hfpatch.plan(tiny("gemma3_text").to(dtype)), "fp16-residual-overflow").decided == "not needed"
    mixed = tiny("gemma3_text").half()
    mixed.model.embed_tokens.bfloat16()
    found = decision(hfpatch.plan(mixed), "fp16-residual-overflow")
    assert (found.decided, "float32" in found.reason) == ("not needed", True)
    applied = decision(hfpatch.plan(tiny("gemma3_text").half()), "fp16-residual-overflow")
    assert "bfloat16 weights, or float32 weights under float16 autocast" in applied.hint


def test_asked_for_and_refused_raises(tiny: Any) -> None:
    with pytest.raises(RefusedError, match="does not cure a tiny flex_olmo"):
        hfpatch.apply(tiny("flex_olmo").half(), only="fp16-residual-overflow")
    assert decision(hfpatch.plan(tiny("flex_olmo").half()), "fp16-residual-overflow").decided == "refused"


def test_a_fault_that_cannot_happen_is_not_refused(tiny: Any) -> None:
    for model in (tiny("bert").half(), tiny("mamba"), tiny("gemma3n_text").bfloat16()):
        made = hfpatch.plan(model)
        assert decision(made, "fp16-residual-overflow").decided == "not needed"
        assert not [d for d in made.decisions if d.worst]


@pytest.mark.parametrize(("architecture", "why"), [("flex_olmo", "it raises"), ("gemma3n_text", "not finite")])
def test_refused_by_name_with_the_reason(architecture: str, why: str) -> None:
    """From the default configs, on meta."""
    model = build_on_meta(CONFIG_MAPPING[architecture](dtype="float16"))
    with pytest.raises(RefusedError, match=why):
        hfpatch.apply(model, only="fp16-residual-overflow")
    found = decision(hfpatch.plan(model), "fp16-residual-overflow")
    assert found.decided == "refused"
    assert "does not cure" in found.reason


def test_exclude(gemma: Any) -> None:
    made = hfpatch.plan(gemma, exclude=["fp16-*", "fp32-*"])
    assert decision(made, "fp16-residual-overflow").reason == "left out by exclude= (--exclude)"
    assert made.edits == ()


def test_trained_norms_are_opt_in_with_the_line_to_type(tiny: Any) -> None:
    model = SpeechLLM(tiny("llama"))
    with torch.no_grad():
        model.ln_speech.bias.add_(0.5)
    found = decision(hfpatch.plan(model), "eps-alignment")
    assert (found.decided, found.effect) == ("opt-in", "changes-function")
    assert found.hint == 'hfpatch.apply(model, include=["eps-alignment"])'
    for words in ({"include": "suggested"}, {"include": ["eps-*"]}, {"only": "eps-alignment"}):
        with hfpatch.apply(model, verbose=False, **words):
            assert model.ln_speech.eps == 1e-6
        assert model.ln_speech.eps == 1e-4


def test_prints_two_to_four_lines_on_stderr(gemma: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    fix = hfpatch.apply(gemma)
    out = capsys.readouterr()
    assert out.out == ""
    assert 2 <= len(out.err.splitlines()) <= 4
    assert "fp16-residual-overflow applied (equivalent): 18 edits" in out.err
    fix.revert()
    hfpatch.apply(gemma, verbose=False).revert()
    monkeypatch.setenv("RANK", "1")
    hfpatch.apply(gemma)
    assert capsys.readouterr().err == ""


def registered(monkeypatch: pytest.MonkeyPatch, found: dict[str, registry.Entry]) -> None:
    """Let these be the patches that there are; `found` may gain others."""
    monkeypatch.setattr(registry, "entries", lambda: found)
    monkeypatch.setattr(registry, "get", lambda name: found[name])
    monkeypatch.setattr(registry, "match", lambda name, also=(): [name])


def test_two_values_for_one_slot_are_a_conflict_found_in_the_plan(tiny: Any, monkeypatch: Any) -> None:
    model = SpeechLLM(tiny("llama"))
    first = registry.get("eps-alignment")
    other = replace(first.patch.edits[0], change=lambda _c, _t: SetAttribute("eps", 1e-3))
    rival = replace(first, id="rival", patch=replace(first.patch, edits=(other,)))
    found = {first.id: first, "rival": rival}
    registered(monkeypatch, found)
    before = fingerprint(model)
    with pytest.raises(ConflictError, match=r"rival wants eps of 'ln_speech' to be 0.001, eps-alignment wants 1e-06"):
        hfpatch.apply(model)
    assert fingerprint(model) == before
    hfpatch.apply(model, only=first.id, verbose=False)
    everywhere = replace(rival.patch.edits[0], where=select.added_norms())
    found["rival"] = replace(
        rival, patch=replace(rival.patch, condition=lambda _c: Needed("it says so"), edits=(everywhere,))
    )
    with pytest.raises(ConflictError, match="rival wants eps"):
        hfpatch.apply(model, only="rival")


@pytest.mark.parametrize("k", [0, 1, 9, 17])
def test_a_failure_at_edit_k_undoes_those_before(k: int, gemma: Any, monkeypatch: Any) -> None:
    before, calls = fingerprint(gemma), []

    def failing(change: type[HookChange]) -> Any:
        real = change.write

        def write(self: HookChange, root: nn.Module, module: nn.Module, before: Any) -> None:
            calls.append(self.slot)
            if len(calls) == k + 1:
                raise RuntimeError("no room")
            real(self, root, module, before)

        return write

    for change in (CastInput, CastOutput):
        monkeypatch.setattr(change, "write", failing(change))
    with pytest.raises(ApplyError, match=r"fp16-residual-overflow: .* of 'model.*no room.*apply changes nothing"):
        hfpatch.apply(gemma)
    assert len(calls) == k + 1
    assert fingerprint(gemma) == before


def test_what_someone_else_changed_since_is_not_overwritten(tiny: Any) -> None:
    model = SpeechLLM(tiny("llama"))
    fix = hfpatch.apply(model, verbose=False)
    model.ln_speech.eps = 1e-3
    fix.revert()
    assert model.ln_speech.eps == 1e-3
    model.ln_speech.eps = 1e-6
    fix.revert()
    assert model.ln_speech.eps == 1e-4


def test_other_peoples_hooks_survive(gemma: Any) -> None:
    def theirs(*_: Any) -> None: ...

    gemma.model.layers[0].register_forward_pre_hook(theirs)
    fix = hfpatch.apply(gemma, verbose=False)
    gemma.model.layers[0].mlp.register_forward_hook(theirs)
    fix.revert()
    assert list(gemma.model.layers[0]._forward_pre_hooks.values()) == [theirs]
    assert list(gemma.model.layers[0].mlp._forward_hooks.values()) == [theirs]


def test_another_model_of_the_class_and_config_does_not_change(tiny: Any, ids: torch.Tensor) -> None:
    one = tiny("llama").half()
    other = type(one)(one.config).half()
    assert other.config is one.config
    before = fingerprint(other)
    hfpatch.apply(one, verbose=False)
    assert fingerprint(other) == before


@pytest.mark.slow
def test_a_changed_body_that_the_repro_survives_is_applied_with_a_warning(gemma: Any, monkeypatch: Any) -> None:
    norm = type(gemma.model.norm)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = self._norm(wide) * (1.0 + self.weight.float())
        return scaled.to(x.dtype)

    monkeypatch.setattr(norm, "forward", forward)
    with torch.autocast("cpu", dtype=torch.float16):  # the repro is run outside the caller's region
        found = decision(hfpatch.plan(gemma), "fp16-residual-overflow")
    assert found.decided == "applied"
    assert "proved here, on a tiny gemma3_text, which runs transformers.models.gemma3" in found.reason
    assert "Gemma3RMSNorm.forward, changed since the shipped proofs" in found.reason


@pytest.mark.slow
def test_a_changed_body_that_the_repro_does_not_survive_is_refused(gemma: Any, monkeypatch: Any) -> None:
    norm = type(gemma.model.norm)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.half()
        return (self._norm(x.float()) * (1.0 + self.weight.float())).to(x.dtype)

    monkeypatch.setattr(norm, "forward", forward)
    found = decision(hfpatch.plan(gemma), "fp16-residual-overflow")
    assert found.decided == "refused"
    assert "Gemma3RMSNorm.forward, changed since the shipped proofs" in found.reason


def test_versions(gemma: Any, monkeypatch: Any) -> None:
    entry = registry.get("fp16-residual-overflow")
    for change, decided, word in (
        ({"transformers": ">=6"}, "refused", "written for transformers >=6"),
        ({"fixed_in": "5.17"}, "not needed", "has this fixed"),
    ):
        changed = replace(entry, patch=replace(entry.patch, **change))
        registered(monkeypatch, {changed.id: changed})
        found = decision(hfpatch.plan(gemma), entry.id)
        assert (found.decided, word in found.reason) == (decided, True)


def test_plan_and_applied_print_as_text_and_html(gemma: Any) -> None:
    made = hfpatch.plan(gemma)
    fix = hfpatch.apply(gemma, verbose=False)
    for shown in (str(made), str(fix), made._repr_html_(), fix._repr_html_()):
        assert "fp16-residual-overflow" in shown
        assert "model.layers.*.mlp" in shown
    assert max(len(line) for line in made.sheet().to_text(80).splitlines()) <= 80
    decisions = {d["patch"]: d for d in made.to_dict()["decisions"]}
    assert decisions["fp16-residual-overflow"]["edits"][0] == {
        "path": "model.layers.0", "slot": "input dtype", "before": "-", "after": "float32"
    }  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        {"only": 3},
        {"only": [None]},
        {"include": True},
        {"exclude": object()},
        {"options": "x"},
        {"options": {"eps-alignment": 3}},
        {"options": {"eps-alignment": {"modules": ["nope*"]}}},
        {"added_modules": 3},
        {"added_modules": "nope", "only": "fp16*"},
        {"only": ["suggested"]},
    ],
)
def test_bad_arguments_are_typed_errors(words: Any, gemma: Any) -> None:
    with pytest.raises(InputError):
        hfpatch.plan(gemma, **words)


def test_a_glob_names_no_patch_in_particular(tiny: Any) -> None:
    made = hfpatch.plan(tiny("bert").half(), only="*")
    assert {d.decided for d in made.decisions} == {"not needed", "refused", "applied"}
    assert CARD & {d.patch for d in made.of("applied")} == {"fp32-attention-logits"}
