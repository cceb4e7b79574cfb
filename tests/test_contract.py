"""Every patch x every architecture it names: a new patch is tested the moment its file exists."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

import hfpatch
from hfpatch.lab.tiny import COMPOSITES, tiny_model
from hfpatch.patching import registry
from hfpatch.patching.language import ANY, Case
from hfpatch.patching.verifying.proving import try_case
from hfpatch.patching.verifying.trial import build
from tests.fingerprint import fingerprint

SAMPLE = ("llama", "gemma3_text", "qwen2", "gpt2", "gemma3")
"""What stands for "every architecture" here."""
OF_EACH_KIND = (
    *("gemma3_text", "llama", "phi3", "cohere", "granite", "mixtral", "qwen3_next"),
    *("gpt2", "falcon", "bloom", "opt", "mbart", "whisper", "qwen2_vl_text"),
)
"""What stands for the many whose residual stream overflows: sandwich and parallel norms, encoders and decoders, ..."""
QUICK = ("gemma3_text", "gpt2")
"""What `make quick` tries each patch on, beside the first architecture that a patch names."""

ENTRIES = registry.entries()


def param(entry: registry.Entry, case: Case, name: str) -> Any:
    there = case.device == "cpu" or torch.cuda.is_available()
    marks = [] if there else [pytest.mark.skip(reason=f"{case} needs a CUDA device")]
    if case.overflow and case.architecture not in OF_EACH_KIND:
        marks.append(pytest.mark.architectures)
    if case.architecture not in (*QUICK, entry.patch.architectures[0]):
        marks.append(pytest.mark.slow)
    return pytest.param(entry, case, id=f"{entry.id}-{name}", marks=marks)


REPROS = [param(e, c, str(c)) for e in ENTRIES.values() for c in e.patch.repros]
NEGATIVES = [param(e, c, str(c)) for e in ENTRIES.values() for c in e.patch.leaves_alone]


def pairs() -> list[Any]:
    out: list[Any] = []
    for entry in ENTRIES.values():
        names = SAMPLE if ANY in entry.patch.architectures else entry.patch.architectures
        for name in names:
            like = next((c for c in entry.patch.repros if c.architecture == name), entry.patch.repros[0])
            out.append(param(entry, replace(like, architecture=name, scale={}, fill={}, config={}, tokens=12), name))
    return out


def shape_of(print_: dict[str, Any]) -> dict[str, Any]:
    """A fingerprint without identities, to compare a copy with the original."""
    return {
        path: (m["class"], m["keys"], [k for k, _ in m["parameters"]], {h: len(v) for h, v in m["hooks"].items()})
        for path, m in print_.items()
    }


@pytest.mark.parametrize(("entry", "case"), REPROS)
def test_repro_shows_the_symptom_and_the_patch_cures_it(entry: registry.Entry, case: Case) -> None:
    result = try_case(entry, case, "repro")
    assert result.passed, result.text


@pytest.mark.parametrize(("entry", "case"), NEGATIVES)
def test_leaves_alone_what_it_must(entry: registry.Entry, case: Case) -> None:
    result = try_case(entry, case, "left alone")
    assert result.passed, result.text


@pytest.mark.parametrize(("entry", "case"), pairs())
def test_life_of_a_patch(entry: registry.Entry, case: Case) -> None:
    """Plan changes nothing; apply does exactly the plan; twice is once; revert restores all; copies revert alone."""
    trial = build(replace(case, overflow=False))
    model, state = trial.model, list(trial.model.state_dict())
    before = fingerprint(model)

    made = hfpatch.plan(model, only=entry.id)
    assert fingerprint(model) == before
    assert made.edits, made.decisions

    fix = hfpatch.apply(model, only=entry.id, verbose=False)
    assert [(e.path, e.slot) for e in fix.edits] == [(e.path, e.slot) for e in made.edits]
    assert len(hfpatch.status(model).records) == len(made.edits)
    if {d.effect for d in made.of("applied")} != {"adds-parameters"}:
        assert list(model.state_dict()) == state
    patched = fingerprint(model)
    assert patched != before

    again = hfpatch.apply(model, only=entry.id, verbose=False)
    assert again.edits == ()
    beside = [d for d in again.plan.decisions if d.worst]  # a tower may be told that nothing serves it
    assert {d.decided for d in again.plan.decisions if d not in beside} == {"not needed"}
    assert fingerprint(model) == patched

    copied, unpickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))  # noqa: S301
    for other in (copied, unpickled):
        assert hfpatch.status(other).patches == (entry.id,)
        hfpatch.revert(other)
        assert not hfpatch.status(other)
        assert shape_of(fingerprint(other)) == shape_of(before)
    assert fingerprint(model) == patched

    fix.revert()
    assert fingerprint(model) == before


@pytest.mark.parametrize(("entry", "case"), [p for p in pairs() if p.values[0].effect == "equivalent"])
def test_equivalent_within_its_tolerance(entry: registry.Entry, case: Case) -> None:
    """On healthy weights the patched model is as near to float32 as the patch states."""
    trial = build(replace(case, overflow=False))
    hfpatch.apply(trial.model, only=entry.id, verbose=False)
    assert trial.error(trial.logits()) <= (entry.patch.tolerance or 0)


@pytest.mark.parametrize(("entry", "case"), [p for p in pairs() if p.values[0].effect == "exact"])
def test_exact_is_bit_identical(entry: registry.Entry, case: Case) -> None:
    trial = build(case)
    before = trial.logits()
    hfpatch.apply(trial.model, only=entry.id, verbose=False)
    assert torch.equal(trial.logits(), before)


@pytest.mark.parametrize("architecture", SAMPLE)
def test_a_bare_apply_leaves_alone_what_healthy_weights_compute(architecture: str, ids: torch.Tensor) -> None:
    model = tiny_model(architecture)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        hfpatch.apply(model, verbose=False)
        assert torch.equal(model(input_ids=ids).logits, before)


def test_every_composite_is_known_by_a_case() -> None:
    used = {c.inside for e in ENTRIES.values() for c in (*e.patch.repros, *e.patch.leaves_alone)}
    assert set(COMPOSITES) <= used
