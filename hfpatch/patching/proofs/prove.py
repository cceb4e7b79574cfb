"""Proves a patch on tiny models: its repros, for one architecture and its flags, or for all architectures."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING

from hfpatch.atlas.atlas import architectures
from hfpatch.errors import RefusedError
from hfpatch.lab.overflow import NothingGrowsError
from hfpatch.lab.sizes import DEFAULTS
from hfpatch.lab.tiny import NOT_TINY, home
from hfpatch.lab.towers import is_tower, towers
from hfpatch.model.embed import find_embedding
from hfpatch.model.source import REJECTIONS
from hfpatch.model.survey import Survey
from hfpatch.model.walk import Submodel
from hfpatch.patching.context import Context
from hfpatch.patching.deciding import CheckProof
from hfpatch.patching.language import ANY, Refused
from hfpatch.patching.proofs.bodies import code_of, structural, subject
from hfpatch.patching.proofs.proof import Outcome, Proof, Subject
from hfpatch.patching.registry import Entry
from hfpatch.patching.verifying.case import Case
from hfpatch.patching.verifying.proving import FAILURES, attempt, plan_alone
from hfpatch.patching.verifying.trial import build, tiny_of
from hfpatch.patching.writing import carry_out


@dataclass(frozen=True)
class _Seen:
    """The tiny model of one repro: what a proof with it is about, and why it lacks the structure, if it does."""

    subject: Subject
    why_not: str


REJECTED = (*FAILURES, *REJECTIONS)
"""What transformers may raise for a config that nobody tried."""


SAME = 1.1
"""Factor by which two errors of one model may differ and count as the same: their roundings do."""


@dataclass(frozen=True)
class _Run:
    """What came of one repro."""

    outcome: Outcome
    text: str


def candidates() -> list[str]:
    """Return the architectures of which a tiny model can be built, alone or inside another, sorted."""
    known = architectures()
    inside = (name for name in CONFIG_MAPPING if home(name) in known and home(name) not in NOT_TINY)
    return sorted({*inside, *towers()})


def prove_all(entry: Entry, names: Sequence[str]) -> Iterator[Proof]:
    """Prove a patch for architectures: their tiny configs, and the flags of their default configs.

    Args:
        entry: The patch; one with `serves`.
        names: `model_type`s. Those in the patch's `but` are left out, and those without the structure.
    """
    for name in names:
        if name in entry.patch.but or (plain := prove(entry, name)) is None:
            continue
        yield plain
        if (about := _of_default(entry, plain)) is not None and (proof := prove(entry, name, about)) is not None:
            yield proof


def _of_default(entry: Entry, plain: Proof) -> Subject | None:
    """Return the subject of the default config of a proof's architecture; None if that has no flags or is unknown."""
    architecture = plain.subject.architecture
    cls: Any = CONFIG_MAPPING[architecture]
    try:
        survey = Survey(tiny_of(Case(architecture, tower=is_tower(architecture))))
    except REJECTIONS:  # it runs inside another model alone
        survey = Survey(tiny_of(Case(architecture, tower=True)))
    inside = next(s for s in survey.submodels if s.architecture == architecture)
    code = code_of(entry, Context(survey, inside, None, entry.patch.options))
    try:
        flags = structural(cls(**copy.deepcopy(DEFAULTS.get(architecture, {}))), code.classes)
    except REJECTIONS:
        return None
    return replace(plain.subject, flags=json.dumps(flags, sort_keys=True)) if flags else None


Make = Callable[[Case], nn.Module]
"""Builds the tiny language model of a case."""


def prove(entry: Entry, architecture: str, about: Subject | None = None, make: Make = tiny_of) -> Proof | None:
    """Run the repros of a patch with `serves` on a tiny model of an architecture.

    Args:
        entry: The patch.
        architecture: `config.model_type`.
        about: The subject for which a plan needs the proof; by default the tiny model of the default config.
        make: Builds the tiny model.

    Returns:
        The proof; None if the tiny model has no submodel of this architecture that reads tokens, or one without the
        structure and with the fault.
    """
    if make is not tiny_of:
        return _prove(entry, about, cases_of(entry, architecture), make)
    first: Proof | None = None
    for cases in ways(entry, architecture, about.settings if about else {}):
        proof = _prove(entry, about, cases, make)
        if proof is not None and proof.outcome != "untried":
            return proof
        first = first or proof
    return first


def ways(entry: Entry, architecture: str, settings: Mapping[str, Any] | None = None) -> list[list[Case]]:
    """Return the repros of a patch for an architecture, once for each way to run them, in the order to try.

    They run on token ids, or inside a model that holds the architecture and on an example batch: a tower, and what
    needs more than token ids, only run so.

    Args:
        entry: The patch.
        architecture: `config.model_type`.
        settings: Values of its config; those of the repros count before them.
    """
    cases = [replace(case, config={**(settings or {}), **case.config}) for case in cases_of(entry, architecture)]
    whole = [replace(case, tower=True) for case in cases]
    return [whole] if is_tower(architecture) else [cases, whole]


def _prove(entry: Entry, about: Subject | None, cases: list[Case], make: Make) -> Proof | None:
    """Run cases; see `prove`."""
    seen = [_seen(entry, case, make) for case in cases]
    if None in seen:
        return None
    readable = [each for each in seen if isinstance(each, _Seen)]
    if not readable:
        return about and Proof(about, "untried", str(seen[0]))
    runs = [_run(entry, case, make) for case in cases]
    tried = [run for run in runs if run.outcome != "untried"] or runs
    order: tuple[Outcome, ...] = ("not cured", "proved", "harmless", "untried")
    worst = min(tried, key=lambda run: order.index(run.outcome))
    if readable[0].why_not and {run.outcome for run in runs} != {"harmless"}:
        return about and Proof(about, "not cured", readable[0].why_not)
    ran = (each for each, run in zip(seen, runs, strict=True) if run.outcome == worst.outcome)
    bodies = frozenset[str]().union(*(each.subject.bodies for each in ran if isinstance(each, _Seen)))
    if about and (other := about.bodies - bodies):
        return Proof(about, "untried", f"its tiny model does not run {len(other)} of the forwards that this model runs")
    return Proof(replace(about or readable[0].subject, bodies=bodies), worst.outcome, worst.text)


def cases_of(entry: Entry, architecture: str) -> list[Case]:
    """Return the repros of a patch for an architecture, those that name it or name all."""
    named = (case for case in entry.patch.repros if case.architecture in (ANY, architecture))
    return [replace(case, architecture=architecture) for case in named if case.device == "cpu"]


def _seen(entry: Entry, case: Case, make: Make) -> _Seen | str | None:
    """Return what the tiny model of a case is; why it cannot be built; None if no such submodel in it reads tokens."""
    try:
        survey = Survey(make(case))
    except REJECTED as error:
        return f"no tiny model of it can be built: {_first_line(error)}"
    inside = [s for s in survey.submodels if s.architecture == case.architecture and _is_tried(case, s)]
    if not inside:
        return None
    contexts = [Context(survey, each, None, entry.patch.options) for each in inside]  # an encoder and a decoder
    why_not = entry.patch.serves.why_not(contexts[0]) if entry.patch.serves else ""
    found = [subject(entry, context, code_of(entry, context)) for context in contexts]
    return _Seen(replace(found[0], bodies=frozenset[str]().union(*(each.bodies for each in found))), why_not)


def _is_tried(case: Case, submodel: Submodel) -> bool:
    """True if a submodel is patched in a proof: one that reads tokens; in the model around a tower, every one."""
    return case.tower or find_embedding(submodel.model) is not None


def _run(entry: Entry, case: Case, make: Make) -> _Run:
    patched: list[str] = []

    def check(each: Entry, context: Context) -> Refused | None:
        if context.submodel is None or not _is_tried(case, context.submodel):
            return Refused("another part is proved here", "not-served")
        if each.id == entry.id:
            patched.append(context.submodel.architecture)
        return None

    try:
        tried = attempt(entry, case, check, make)
    except NothingGrowsError as error:
        return _Run("harmless", str(error))
    except REJECTED as error:
        return _Run("untried", f"{case}: {_first_line(error)}")
    if tried.before is None:
        return _Run("untried", f"{case}: the fault does not show")
    if case.architecture not in patched:
        return _Run("not cured", f"{case}: {tried.reasons}")
    if tried.after is not None:
        return _Run("not cured", f"{case}: {tried.after}")
    if far := _too_far(entry, case, check, make):
        return _Run("not cured", f"{case}: {far}")
    return _Run("proved", f"{case}: {tried.before}; with the patch: none")


def _too_far(entry: Entry, case: Case, check: CheckProof, make: Make) -> str:
    """Return how far from float32 a patch that claims to be equivalent is on healthy weights; empty if near enough."""
    if entry.patch.tolerance is None:
        return ""
    trial = build(healthy(case), make)
    stock = trial.error(trial.logits())
    carry_out(trial.model, plan_alone(entry, trial.model, asked=True, check=check))
    try:
        error = trial.error(trial.logits())
    except (RuntimeError, RefusedError) as raised:  # mixed dtypes; a forward that the patch's hooks refuse
        return f"on healthy weights it does not run: {_first_line(raised)}"
    if error <= most_error(entry, stock):
        return ""
    return (
        f"on healthy weights its logits are {error:.1e} from float32's; the patch states {entry.patch.tolerance:g}, "
        f"and without it they are {stock:.1e} from them"
    )


def healthy(case: Case) -> Case:
    """Return a case without what makes its symptom, but for its config."""
    return replace(case, scale={}, fill={}, layers=None, overflow=False, branches=False)


def most_error(entry: Entry, stock: float) -> float:
    """Return how far from float32 a patched model may be on healthy weights: as far as the patch states.

    Where the stock model is farther than that, it may be as far as the stock model.
    """
    return max(entry.patch.tolerance or 0.0, SAME * stock)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
