"""Proof: a patch's own cases; and one model on one batch, as it is and in other dtypes, against float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hfpatch.errors import HfpatchError, InputError, UnknownPatchError
from hfpatch.given import shown
from hfpatch.model.survey import Survey, root_module
from hfpatch.patching import registry
from hfpatch.patching.context import Context, Target
from hfpatch.patching.language import Case
from hfpatch.patching.record import Record, logged
from hfpatch.patching.registry import Entry
from hfpatch.patching.verifying.compare import Edited, compare
from hfpatch.patching.verifying.figures import Figures, Proof
from hfpatch.patching.verifying.lending import weights_as
from hfpatch.patching.writing import lifted

if TYPE_CHECKING:
    from hfpatch.patching.apply import Applied
    from hfpatch.patching.arguments import Names

__all__ = [
    "CaseResult",
    "Figures",
    "Proof",
    "prove",
    "prove_patch",
    "try_case",
    "try_repro",
    "verify",
    "weights_as",
]

NO_GPU = "skipped: no GPU"


@dataclass(frozen=True)
class CaseResult:
    """How a patch did on one of its cases. One that needs a GPU and finds none is skipped, which is not passed."""

    patch: str
    kind: str
    case: str
    passed: bool
    text: str
    skipped: bool = False


def prove_patch(entry: Entry) -> list[CaseResult]:
    """Run every case of a patch."""
    if not isinstance(entry, Entry):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"prove_patch: want an entry of hfpatch.list_patches(), got {shown(entry)}")
    cases = [(c, "repro") for c in entry.patch.repros] + [(c, "left alone") for c in entry.patch.leaves_alone]
    return [try_case(entry, case, kind) for case, kind in cases]


def try_case(entry: Entry, case: Case, kind: str) -> CaseResult:
    """Run one case: a `repro` must show the symptom and lose it, a `left alone` case must not be patched."""
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
    ) as error:
        return CaseResult(entry.id, kind, str(case), False, f"{type(error).__name__}: {error}")


def try_repro(entry: Entry, case: Case) -> CaseResult:
    """Show the symptom on the unpatched case and its absence on the patched one."""
    from hfpatch.patching.plan import plan_alone
    from hfpatch.patching.verifying.trial import build
    from hfpatch.patching.writing import carry_out

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
    from hfpatch.patching.plan import plan_alone
    from hfpatch.patching.verifying.trial import build

    made = plan_alone(entry, build(case).model, asked=False)
    decided = "; ".join(f"{d.decided}: {d.reason}" for d in made.decisions)
    return CaseResult(entry.id, "left alone", str(case), not made.edits, decided)


def verify(model: object, batch: Mapping[str, Any], *, runs: Names = None) -> Proof:
    """Run a model on a batch as it is, and in other dtypes, and hold each against float32 with the same weights.

    Patches that it carries are judged as `Applied.verify` does; without any, this compares dtypes. The loss is the
    model's own. The model is left as it was, and no second copy of its weights is made.

    Args:
        model: A module, however wrapped, or an object whose `.model` is one (a Trainer).
        batch: Keyword arguments of the model: `input_ids [batch, tokens]` and what else it takes. A causal model that
            is given no labels gets `input_ids`, without padding, as labels.
        runs: Names of the rows wanted, e.g. `["as it is", "bfloat16 weights"]`; all if not given.

    Returns:
        Loss, KL and top-1 of each row; on a GPU time and memory of a step. Prints as a table.

    Raises:
        NotAModelError: `model` holds no torch module.
        InputError: The batch does not run in float32, the model returns no logits, or there is no such row.
    """
    root = root_module(model)
    return compare(root, batch, _carried(root), runs)


def prove(applied: Applied, batch: Mapping[str, Any], runs: Names = None) -> Proof:
    """See `Applied.verify`. The model is left as it was: patched, in its mode, its weights untouched."""
    effects = {(id(e.module), e.change.place, d.patch): d.effect for d in applied.plan.of("applied") for e in d.edits}
    edits = [Edited(m, r, str(effects.get((id(m), r.change.place, r.patch), "unknown"))) for m, r in applied.log()]
    return compare(applied.model, batch, edits, runs)


def _carried(root: nn.Module) -> list[Edited]:
    """Every edit a model carries, with the effect it has on this model, for whoever lost the handle."""
    log = [(module, record) for _, module, record in logged(root)]
    out: list[Edited] = []
    for patch in dict.fromkeys(record.patch for _, record in log):
        mine = [(m, r) for m, r in log if r.patch == patch]
        out += [Edited(m, r, effect) for (m, r), effect in zip(mine, _effects(root, patch, mine), strict=True)]
    return out


def _effects(root: nn.Module, patch: str, log: Sequence[tuple[nn.Module, Record]]) -> list[str]:
    try:
        effect = registry.get(patch).patch.effect
    except UnknownPatchError:  # of a package that is not installed here
        return ["unknown"] * len(log)
    if not callable(effect):
        return [effect] * len(log)
    options = registry.get(patch).patch.options
    out: list[str] = []
    with lifted(root, log):
        survey = Survey(root)
        for module, _ in log:
            path = survey.path(module)
            holder = survey.holder(path)
            context = Context(survey, holder, None, options)
            out.append(effect(context, Target(path, module)) if holder is not None else "changes-function")
    return out
