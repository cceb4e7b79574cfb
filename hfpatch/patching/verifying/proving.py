"""Runs the cases of a patch: each is built, planned, patched and checked for the symptom."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hfpatch.errors import HfpatchError, InputError
from hfpatch.given import shown
from hfpatch.model.survey import Survey
from hfpatch.patching import registry
from hfpatch.patching.deciding import decide, opt_in
from hfpatch.patching.decision import Decisions
from hfpatch.patching.language import Patch
from hfpatch.patching.registry import Entry
from hfpatch.patching.verifying.case import Case
from hfpatch.patching.verifying.trial import build
from hfpatch.patching.writing import carry_out
from hfpatch.report import Sheet, Shown

NO_GPU = "skipped: no GPU"


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
    """Run every case of a patch.

    Args:
        entry: An entry of `hfpatch.list_patches()`, or a `Patch`, registered or not.

    Raises:
        InputError: `entry` is neither.
    """
    if isinstance(entry, Patch):
        entry = registry.entry_of(entry) or Entry("unregistered", entry, Path(), {})
    if not isinstance(entry, Entry):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"prove_patch: want an entry of hfpatch.list_patches() or a Patch, got {shown(entry)}")
    cases = [(c, "repro") for c in entry.patch.repros] + [(c, "left alone") for c in entry.patch.leaves_alone]
    return CaseResults(try_case(entry, case, kind) for case, kind in cases)


def try_case(entry: Entry, case: Case, kind: str) -> CaseResult:
    """Run one case: a `repro` must show the symptom and lose it when patched; `left alone` must not be patched."""
    if case.device == "cuda" and not torch.cuda.is_available():
        return CaseResult(entry.id, kind, str(case), False, NO_GPU, skipped=True)
    try:
        return try_repro(entry, case) if kind == "repro" else _try_negative(entry, case)
    except (
        HfpatchError,
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        StopIteration,
        SystemExit,
    ) as error:
        return CaseResult(entry.id, kind, str(case), False, f"{type(error).__name__}: {error}")


def try_repro(entry: Entry, case: Case) -> CaseResult:
    """Run a repro: it passes if the symptom shows on the unpatched model and not on the patched one."""
    trial = build(case)
    before = entry.patch.symptom(trial)
    made = plan_alone(entry, trial.model, asked=True)
    carry_out(trial.model, made)
    after = entry.patch.symptom(trial)
    reason = "" if made.edits else f" ({'; '.join(d.reason for d in made.decisions)})"
    passed = before is not None and after is None and bool(made.edits)
    text = f"before: {before or 'no symptom'}; after: {after or 'cured'}{reason}"
    return CaseResult(entry.id, "repro", str(case), passed, text)


def _try_negative(entry: Entry, case: Case) -> CaseResult:
    made = plan_alone(entry, build(case).model, asked=False)
    decided = "; ".join(f"{d.decided}: {d.reason}" for d in made.decisions)
    return CaseResult(entry.id, "left alone", str(case), not made.edits, decided)


def plan_alone(entry: Entry, model: object, *, asked: bool) -> Decisions:
    """Return the plan of one patch for a case of its own, without a check of upstream methods.

    Args:
        entry: The patch.
        model: The model of the case.
        asked: True to plan as if the caller had named the patch.
    """
    survey = Survey(model)
    decided = decide(entry, survey, None, entry.patch.options, check_upstream=lambda _entry, _context: None)
    return Decisions(type(survey.root).__name__, tuple(opt_in(d, asked) for d in decided))
