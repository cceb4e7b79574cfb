"""Runs the cases of a patch: each is built, planned, patched and checked for the symptom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hfpatch.errors import HfpatchError, InputError
from hfpatch.given import shown
from hfpatch.inspecting.peaks import Peaks
from hfpatch.model.survey import Survey
from hfpatch.patching import registry
from hfpatch.patching.deciding import CheckProof, decide, no_check, opt_in, without_needed
from hfpatch.patching.decision import Decisions
from hfpatch.patching.language import ANY, Patch
from hfpatch.patching.registry import Entry
from hfpatch.patching.verifying.case import Case
from hfpatch.patching.verifying.need import measure
from hfpatch.patching.verifying.trial import build, model_of, tiny_of
from hfpatch.patching.writing import carry_out
from hfpatch.report import Sheet, Shown

NO_GPU = "skipped: no GPU"

FAILURES = (HfpatchError, RuntimeError, ValueError, TypeError, AttributeError, KeyError, StopIteration)
"""What building or running a tiny model may raise."""


@dataclass(frozen=True)
class Attempt:
    """A repro that was run.

    Attributes:
        before: The symptom without the patch; None if it did not show.
        after: The symptom with the patch; None if it is cured.
        edits: The number of edits that the patch made.
        reasons: The reasons of its decisions.
    """

    before: str | None
    after: str | None
    edits: int
    reasons: str


@dataclass(frozen=True)
class CaseResult:
    """The result of a patch on one of its cases. A case that needs a GPU is skipped without one: `passed` is False.

    Attributes:
        patch: Id of the patch.
        kind: `repro` or `left alone`.
        case: The case as text.
        passed: True if the case was run and passed.
        text: A sentence about the run.
        skipped: True if the case was not run.
    """

    patch: str
    kind: str
    case: str
    passed: bool
    text: str
    skipped: bool = False

    @property
    def word(self) -> str:
        """`passed`, `failed` or `skipped`."""
        return "skipped" if self.skipped else "passed" if self.passed else "failed"


class CaseResults(Shown, list[CaseResult]):
    """The results of patches on their cases: a list that prints as a table."""

    @property
    def skipped(self) -> int:
        """The number of cases that were not run because they need a GPU."""
        return sum(r.skipped for r in self)

    @property
    def passed(self) -> bool:
        """True if no case that was run failed."""
        return all(r.passed or r.skipped for r in self)

    def to_dict(self) -> dict[str, Any]:
        """Return passed, skipped and cases (patch, kind, case, passed, text, skipped), for JSON."""
        return {"passed": self.passed, "skipped": self.skipped, "cases": [asdict(r) for r in self]}

    def sheet(self) -> Sheet:
        """Return a table with a row per case."""
        rows = tuple((r.patch, r.kind, r.word, f"{r.case}\n{r.text}") for r in self)
        title = f"{sum(r.passed for r in self)} of {len(self) - self.skipped} cases passed"
        told = "case, and what was seen"
        title = f"{title}; {self.skipped} skipped, no GPU" if self.skipped else title
        return Sheet(title, ("patch", "kind", "", told), rows, wide=(told,))


def prove_patch(entry: Entry | Patch) -> CaseResults:
    """Run every case of a patch. A repro for every architecture of a structure is run for those that are proved.

    Args:
        entry: An entry of `hfpatch.list_patches()`, or a `Patch`, registered or not.

    Raises:
        InputError: `entry` is neither.
    """
    if isinstance(entry, Patch):
        entry = registry.entry_of(entry) or Entry("unregistered", entry, Path(), {})
    if not isinstance(entry, Entry):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"prove_patch: want an entry of hfpatch.list_patches() or a Patch, got {shown(entry)}")
    cases = [(c, "repro") for c in repros(entry)] + [(c, "left alone") for c in entry.patch.leaves_alone]
    return CaseResults(try_case(entry, case, kind) for case, kind in cases)


def repros(entry: Entry) -> list[Case]:
    """Return the repros of a patch; one for every architecture is a repro for each that is proved."""
    return [
        replace(case, architecture=name)
        for case in entry.patch.repros
        for name in (entry.proved if case.architecture == ANY else (case.architecture,))
    ]


def try_case(entry: Entry, case: Case, kind: str) -> CaseResult:
    """Run one case: a `repro` must show the symptom and lose it when patched; `left alone` must not be patched."""
    if case.device == "cuda" and not torch.cuda.is_available():
        return CaseResult(entry.id, kind, str(case), False, NO_GPU, skipped=True)
    try:
        return try_repro(entry, case) if kind == "repro" else _try_negative(entry, case)
    except (*FAILURES, SystemExit) as error:
        return CaseResult(entry.id, kind, str(case), False, f"{type(error).__name__}: {error}")


def try_repro(entry: Entry, case: Case) -> CaseResult:
    """Run a repro: it passes if the symptom shows on the unpatched model and not on the patched one."""
    tried = attempt(entry, case)
    reasons = "" if tried.edits else f" ({tried.reasons})"
    passed = tried.before is not None and tried.after is None and bool(tried.edits)
    text = f"before: {tried.before or 'no symptom'}; after: {tried.after or 'cured'}{reasons}"
    return CaseResult(entry.id, "repro", str(case), passed, text)


def attempt(
    entry: Entry, case: Case, check: CheckProof = no_check, make: Callable[[Case], nn.Module] = tiny_of
) -> Attempt:
    """Build a repro, look for the symptom, patch the model and look again.

    Args:
        entry: The patch.
        case: The repro.
        check: See `decide`.
        make: See `build`.
    """
    trial = build(case, make)
    before = entry.patch.symptom(trial)
    peaks = measure(trial.model, trial.inputs(), "prove") if case.branches else None
    made = plan_alone(entry, trial.model, asked=True, check=check, peaks=peaks)
    carry_out(trial.model, made)
    try:
        after = entry.patch.symptom(trial)
    except (RuntimeError, ValueError, TypeError) as error:
        if not made.edits:
            raise
        after = f"with the patch it raises {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return Attempt(before, after, len(made.edits), "; ".join(d.reason for d in made.decisions))


def _try_negative(entry: Entry, case: Case) -> CaseResult:
    made = plan_alone(entry, model_of(case), asked=False)
    decided = "; ".join(f"{d.decided}: {d.reason}" for d in made.decisions)
    return CaseResult(entry.id, "left alone", str(case), not made.edits, decided)


def plan_alone(
    entry: Entry, model: object, *, asked: bool, check: CheckProof = no_check, peaks: Peaks | None = None
) -> Decisions:
    """Return the plan of one patch, after those that it needs, for a case of its own, which no proof has to cover.

    Args:
        entry: The patch.
        model: The model of the case.
        asked: True to plan as if the caller had named the patch.
        check: See `decide`.
        peaks: See `decide`.
    """
    survey = Survey(model)
    entries = [*(registry.get(need) for need in entry.patch.needs if asked), entry]
    decided = [
        opt_in(decision, asked)
        for each in entries
        for decision in decide(each, survey, None, each.patch.options, check, peaks)
    ]
    return Decisions(type(survey.root).__name__, tuple(without_needed(survey, decided, {entry.id: entry})))
