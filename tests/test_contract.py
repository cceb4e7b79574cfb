"""Every patch x every architecture it names: a new patch is tested the moment its file exists.

`make quick` tries the first case of each list of each patch, and the life of a patch on the first architecture that has
each kind of edit. `make test` tries all, but streams and branches that overflow on one architecture of each kind; `make
test-architectures` tries these on each architecture for which they are proved (`architectures/test_contract_sweep.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

import hfpatch
from hfpatch.lab.tiny import COMPOSITES, tiny_model
from hfpatch.patching import registry
from hfpatch.patching.language import ANY, Case
from hfpatch.patching.proofs.prove import most_error
from hfpatch.patching.verifying.proving import repros, try_case
from hfpatch.patching.verifying.trial import build, model_of
from tests.lives import live

SAMPLE = ("llama", "gemma3_text", "qwen2", "gpt2", "gemma3")
"""What stands for "every architecture" here."""
OF_EACH_KIND = ("gemma3_text", "phi3", "cohere", "mixtral", "qwen3_next", "gpt2", "whisper", "qwen2_vl_text")
"""What stands for the many whose residual stream overflows: sandwich and parallel norms, encoders and decoders, ..."""

ENTRIES = registry.entries()


def here(case: Case) -> bool:
    return case.device == "cpu" or torch.cuda.is_available()


def sampled(case: Case) -> bool:
    """True if `make test` tries it."""
    return not (case.overflow or case.branches) or case.architecture in OF_EACH_KIND


def params(entry: registry.Entry, cases: Iterable[Case], name: Callable[[Case], str] = str) -> list[Any]:
    """One for each case; all are slow but the first that can be tried."""
    cases = [case for case in cases if sampled(case)]
    first = next(filter(here, cases), None)
    out: list[Any] = []
    for case in cases:
        marks = [] if here(case) else [pytest.mark.skip(reason=f"{case} needs a CUDA device")]
        if case is not first:
            marks.append(pytest.mark.slow)
        out.append(pytest.param(entry, case, id=f"{entry.id}-{name(case)}", marks=marks))
    return out


def lives(entry: registry.Entry) -> list[Case]:
    """A case for each architecture of a patch, with nothing of what makes the symptom but the config."""
    names, tried = entry.architectures, repros(entry)
    if ANY in names:
        names = dict.fromkeys((*SAMPLE, *(case.architecture for case in tried)))
    out: list[Case] = []
    for name in names:
        like = next((c for c in tried if c.architecture == name), entry.patch.repros[0])
        if not sampled(replace(like, architecture=name)):
            continue
        config = like.config if like.architecture == name else {}
        if any((c.architecture, c.dtype, c.cls) == (name, like.dtype, None) for c in entry.patch.leaves_alone):
            continue
        plain = replace(like, scale={}, fill={}, layers=None, tokens=12, branches=False)
        out.append(replace(plain, architecture=name, config=config))
    return out


REPROS = [p for e in ENTRIES.values() for p in params(e, repros(e))]
NEGATIVES = [p for e in ENTRIES.values() for p in params(e, e.patch.leaves_alone)]
PAIRS = [p for e in ENTRIES.values() for p in params(e, lives(e), lambda case: case.architecture)]


@pytest.mark.parametrize(("entry", "case"), REPROS)
def test_repro_shows_the_symptom_and_the_patch_cures_it(entry: registry.Entry, case: Case) -> None:
    result = try_case(entry, case, "repro")
    assert result.passed, result.text


@pytest.mark.parametrize(("entry", "case"), NEGATIVES)
def test_leaves_alone_what_it_must(entry: registry.Entry, case: Case) -> None:
    result = try_case(entry, case, "left alone")
    assert result.passed, result.text


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "case"), PAIRS)
def test_life_of_a_patch(entry: registry.Entry, case: Case) -> None:
    lived(entry, case)


@pytest.mark.parametrize("entry", [e for e in ENTRIES.values() if any(map(here, repros(e)))], ids=lambda e: e.id)
def test_life_of_each_kind_of_edit(entry: registry.Entry) -> None:
    """On the first architecture, of those that stand for others, in which the patch makes edits of a kind."""
    seen: set[tuple[type, type]] = set()
    for case in filter(sampled, (*lives(entry), *repros(entry))):
        made = hfpatch.plan(model_of(replace(case, overflow=False)), only=entry.id)
        kinds = {(type(edit.change), type(edit.after)) for edit in made.edits}
        if not kinds <= seen:
            lived(entry, case)
            seen |= kinds
        if len(seen) >= len(entry.patch.edits):
            break
    assert seen


def lived(entry: registry.Entry, case: Case) -> None:
    for each in (case, *(c for c in repros(entry) if c.architecture == case.architecture)):  # weights may decide
        model = model_of(replace(each, overflow=False))
        made = hfpatch.plan(model, only=entry.id)
        if made.edits:
            break
    if (
        ANY in entry.architectures
        and not made.edits
        and case.architecture not in {c.architecture for c in repros(entry)}
    ):
        assert {d.decided for d in made.decisions} == {"not needed"}, made.decisions  # it does not have this fault
        return
    live(entry, model)


@pytest.mark.parametrize(("entry", "case"), [p for p in PAIRS if p.values[0].effect == "equivalent"])
def test_equivalent_within_its_tolerance(entry: registry.Entry, case: Case) -> None:
    """On healthy weights the patched model is as near to float32 as the patch states."""
    trial = build(replace(case, overflow=False))
    stock = trial.error(trial.logits())
    hfpatch.apply(trial.model, only=entry.id, verbose=False)
    assert trial.error(trial.logits()) <= most_error(entry, stock)


@pytest.mark.parametrize(
    ("entry", "case"), [p for p in PAIRS if p.values[0].effect == "exact" and p.values[1].architecture in SAMPLE]
)
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
