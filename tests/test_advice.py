"""From a finding to the patches that answer it: what is said, and that the registry's answers are true."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfpatch
from hfpatch.advice import answer
from hfpatch.lab.tiny import tiny_model
from hfpatch.patching import registry
from hfpatch.patching.language import Case
from hfpatch.patching.verifying.proving import repros
from hfpatch.patching.verifying.trial import build
from hfpatch.symptoms import SYMPTOMS
from hfpatch.tracing import trace
from hfpatch.tracing.finding import Finding

UNTRIED = "not tried (the traced call was not kept): hfpatch.apply(model, only="
TRIED = "tried on this call: finite: "
ANSWERED = {symptom for entry in registry.entries().values() for symptom in entry.patch.answers}
PROVED = [
    (name, case)
    for name, entry in registry.entries().items()
    if entry.patch.answers
    for case in repros(entry)
    if not case.overflow or case.architecture in ("gemma3_text", "llama", "gpt2", "falcon", "mbart", "cohere")
]


def finding(symptom: str, module: str = "model.layers.0", **more: Any) -> Finding:
    return Finding(
        phase="forward",
        epoch=0,
        step=0,
        module=module,
        kind="Layer",
        tensor="output of model.layers.0",
        operation="add",
        operand="",
        holds="1 NaN of 2 elements",
        symptom=symptom,
        why="because",
        dtype="float16",
        **more,
    )


def said(symptom: str, model: nn.Module) -> str:
    return "\n".join(answer(finding(symptom), model).sentences)


def named(symptom: str, model: nn.Module) -> tuple[str, ...]:
    return answer(finding(symptom), model).patches


class TestWords:
    def test_applied(self, gemma: nn.Module) -> None:
        assert said("residual-overflow", gemma) == f"{UNTRIED}['fp16-residual-overflow'])"
        assert named("residual-overflow", gemma) == ("fp16-residual-overflow",)

    def test_the_line_can_be_run(self, gemma: nn.Module, ids: torch.Tensor) -> None:
        with hfpatch.trace(gemma) as t, torch.no_grad():
            gemma(ids)
        line = t.report().notes[-1]
        assert line.startswith(TRIED)
        exec(line.removeprefix(TRIED), {"hfpatch": hfpatch, "model": gemma})  # noqa: S102
        with hfpatch.trace(gemma) as t, torch.no_grad():
            gemma(ids)
        found = t.first_bad
        assert found is not None
        assert (found.symptom, t.patches) == ("cast-buffer", ("fp32-buffers",))  # .half() rounded them
        hfpatch.apply(gemma, only="fp32-buffers", verbose=False)
        with hfpatch.trace(gemma) as t, torch.no_grad():
            gemma(ids)
        assert nonfinite(t) is None

    def test_in_a_wrapper(self, gemma: nn.Module) -> None:
        class Trainer:
            model = nn.ModuleDict({"inner": gemma})

        assert answer(finding("residual-overflow", "inner.model.layers.0"), Trainer()).patches == (
            "fp16-residual-overflow",
        )

    @pytest.mark.parametrize("symptom", ["attention-logits-overflow", "masked-row"])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_opt_in(self, tiny: Callable[[str], nn.Module], symptom: str, dtype: torch.dtype) -> None:
        """Applied in float16, offered in the others."""
        model = tiny("qwen2").to(dtype)
        decided = {d.patch: d.decided for d in hfpatch.plan(model).decisions}
        assert decided["fp32-attention-logits"] == ("applied" if dtype == torch.float16 else "opt-in")
        assert said(symptom, model) == f"{UNTRIED}['fp32-attention-logits'])"

    def test_refused(self, tiny: Callable[[str], nn.Module]) -> None:
        first, second = said("residual-overflow", tiny("flex_olmo").half()).splitlines()
        assert first.startswith(
            "fp16-residual-overflow fixes this, but is refused here: it does not cure a tiny flex_olmo"
        )
        assert first.endswith("; stock alternatives: bfloat16 weights, or float32 weights under float16 autocast")
        assert second == "No other patch is known for this."

    @pytest.mark.slow
    def test_of_an_architecture_that_it_does_not_serve(self) -> None:
        text = said("residual-overflow", tiny_model("zamba").half())
        assert "fp16-residual-overflow fixes this, but is refused here: it is not proved for zamba: " in text

    @pytest.mark.slow
    def test_of_a_tower_that_it_does_not_serve(self) -> None:
        block = "model.vqmodel.encoder.down_block.down.0.block.0"
        text = " ".join(answer(finding("residual-overflow", block), tiny_model("emu3").half()).sentences)
        assert (
            "refused here: the stream of its Emu3VQVAEResnetBlock of emu3_vqgan is float16, whose maximum is " in text
        )

    def test_of_no_transformers_model(self) -> None:
        text = said("residual-overflow", nn.Linear(2, 2))
        assert text.startswith("fp16-residual-overflow fixes this, but is refused here: ")
        assert text.endswith("No other patch is known for this.")

    def test_already_applied(self, gemma: nn.Module) -> None:
        hfpatch.apply(gemma, only="fp16-residual-overflow", verbose=False)
        first, second = said("residual-overflow", gemma).splitlines()
        assert first == ("fp16-residual-overflow fixes this, but is not needed here: already applied (18 edits)")
        assert second == "No other patch is known for this."
        assert named("residual-overflow", gemma) == ()

    def test_not_needed(self, tiny: Callable[[str], nn.Module]) -> None:
        assert "not needed here: its weights are on cpu" in said("attention-backward-nan", hfpatch_sdpa(tiny("qwen2")))

    @pytest.mark.parametrize("symptom", sorted(set(SYMPTOMS) - ANSWERED))
    def test_no_patch_is_known(self, symptom: str, gemma: nn.Module) -> None:
        (line,) = answer(finding(symptom), gemma).sentences
        assert line.startswith("No patch is known for this")
        assert line.endswith(".")
        assert named(symptom, gemma) == ()

    @pytest.mark.parametrize(
        ("symptom", "hint"),
        [("bad-weight", "hfpatch scan"), ("no-labels", "hfpatch.Guard"), ("bad-input", "collator")],
    )
    def test_where_to_look_instead(self, symptom: str, hint: str, gemma: nn.Module) -> None:
        assert hint in said(symptom, gemma)

    def test_what_a_scaler_answers(self, gemma: nn.Module) -> None:
        ordinary = finding("scale-too-high", ordinary=True)
        assert "No patch is needed" in "".join(answer(ordinary, gemma).sentences)
        assert answer(ordinary, gemma).patches == ()


def hfpatch_sdpa(model: Any) -> nn.Module:
    model.set_attn_implementation("sdpa")
    return model


def nonfinite(t: Any) -> Any:
    """The first finding that is not one of growth: weights that are scaled for a case make the model grow."""
    return next((f for f in t.findings if f.symptom not in ("growth", "vanishing")), None)


class TestKeys:
    def test_an_unknown_one_is_told_when_the_patch_is_made(self) -> None:
        patch = registry.get("fp16-residual-overflow").patch
        with pytest.raises(ValueError, match=r"answers made-up: no such symptom"):
            replace(patch, answers=("residual-overflow", "made-up"))

    def test_every_one_that_the_tracer_gives_is_known_and_the_other_way_round(self) -> None:
        """Symptoms are the hyphenated words in the tracer's code, and those of one word."""
        given: set[str] = set()
        for file in Path(trace.__file__).parent.rglob("*.py"):
            texts = {n.value for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Constant)}
            given |= {
                t for t in texts if isinstance(t, str) and (t in SYMPTOMS or re.fullmatch(r"[a-z]+(-[a-z]+)+", t))
            }
        assert given == set(SYMPTOMS)


@pytest.mark.parametrize(("patch", "case"), PROVED, ids=[f"{patch}-{case}" for patch, case in PROVED])
@pytest.mark.slow
def test_answers_are_true(patch: str, case: Case) -> None:
    """The repro of a patch, traced: what is found is what the patch says it answers, and is gone once it is applied."""
    if case.device == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"{case} needs a GPU")
    entry = registry.get(patch)
    found = traced(case, patched=False)
    if found is None or (found.symptom == "cast-buffer" and "cast-buffer" not in entry.patch.answers):
        assert case.autocast is not None or "relative error" in (entry.patch.symptom(build(case)) or "")
        return
    assert found.symptom in (*entry.patch.answers, *entry.patch.answers_where_it_edits)
    assert traced(case, patched=True) is None


@pytest.mark.parametrize("patch", sorted({patch for patch, _ in PROVED}))
def test_each_has_a_case_that_proves_it(patch: str) -> None:
    cases = [case for name, case in PROVED if name == patch]
    if all(case.device == "cuda" for case in cases) and not torch.cuda.is_available():
        pytest.skip(f"the cases of {patch} need a GPU")
    assert traced(cases[0], patched=False) is not None


def traced(case: Case, *, patched: bool) -> Finding | None:
    """What the tracer finds in a case, with the patches that answer it or without; the advice must name them."""
    trial = build(case)
    if patched:
        (entry,) = (e for e in registry.entries().values() if case in repros(e))
        hfpatch.apply(trial.model, only=entry.id, verbose=False)
    with hfpatch.trace(trial.model) as t:
        logits = trial.logits()
        wrong = not bool(logits.isfinite().all())
        if not wrong and case.device == "cuda":
            wrong = bool(trial.bad_gradients())
    found = nonfinite(t)
    assert found is not None or not wrong
    if found is not None:
        clamped = case.dtype == "float16" and trial.model.config.is_encoder_decoder  # T5's: finite, and wrong
        if patched and found.symptom == "cast-buffer":
            return None  # .half() rounded them: another patch's
        assert wrong or clamped or found.symptom == "cast-buffer"
        (entry,) = (e for e in registry.entries().values() if case in repros(e))
        if found.symptom != "cast-buffer" or entry.id == "fp32-buffers":
            assert t.patches == (entry.id,)
            assert t.advice[0].startswith("tried on this call: ")
    return found
