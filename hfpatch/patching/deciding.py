"""Decides about one patch and one model: its condition, its selections, and the edits that are in place already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hfpatch.errors import RefusedError
from hfpatch.model.walk import inside, traced
from hfpatch.patching.context import Context, Target
from hfpatch.patching.decision import Decision
from hfpatch.patching.edits import Edit
from hfpatch.patching.kinds.states import show
from hfpatch.patching.language import UNASKED, Effect, Needed, NotNeeded, Offered, Refused
from hfpatch.patching.preconditions.compiled import compiled_already, compiled_elsewhere
from hfpatch.patching.record import record_at, records_of, state_of
from hfpatch.patching.registry import Entry

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hfpatch.inspecting.peaks import Peaks
    from hfpatch.model.survey import Survey

CheckProof = Callable[[Entry, Context], Needed | NotNeeded | Refused | None]
"""Looks up the proof that a patch works on a submodel; returns None if it was proved before."""


def no_check(_entry: Entry, _context: Context) -> None:
    """Ask for no proof: for a case that is one."""


def decide(
    entry: Entry,
    survey: Survey,
    compute_dtype: torch.dtype | None,
    options: Mapping[str, Any],
    check: CheckProof,
    peaks: Peaks | None = None,
) -> list[Decision]:
    """Decide what one patch would do to each submodel it supports. Changes nothing.

    Args:
        entry: The patch.
        survey: Of the whole object.
        compute_dtype: The dtype the model will run in, if its weights have another one now.
        options: All options of the patch.
        check: Looks up the proof; called only if there is an edit to make, or if the structure for it is missing.
        peaks: The largest values on the caller's batch.
    """
    patch = entry.patch
    refusal = _version_refusal(entry)
    if refusal is not None:
        return [replace(refusal, patch=entry.id)]
    if why := traced(survey.root):
        return [Decision(entry.id, None, "refused", why, vital=False, unasked=True, code="not-served")]
    out: list[Decision] = []
    for submodel in (None,) if patch.whole else survey.submodels:
        context = Context(survey, submodel, compute_dtype, options, peaks=peaks)
        if patch.whole or considered(entry, context):
            out.extend(_decide_one(entry, context, check))
    for submodel in survey.submodels:
        if submodel.architecture in patch.but:
            out.append(_excepted(entry, Context(survey, submodel, compute_dtype, options, peaks=peaks)))
    if not out:
        have = ", ".join(sorted({s.architecture for s in survey.submodels}))
        not_there = (
            f"does not support {have}: no case proves it there" if have else "there is no transformers model here"
        )
        why = f"{not_there}; it supports {_listed(entry.architectures)}"
        out.append(Decision(entry.id, None, "refused", why, hint=patch.suggests, vital=None, code="not-served"))
    # Submodels for which there is nothing to do get no row each, unless a run showed it
    rows = [d for d in out if d.decided != "not needed" or d.lapsed or d.code == "harmless"]
    rows = [d for d in rows if not (d.code == "no-such-place" and _around_served(d, out))]
    distinct = {(patch.serves and d.submodel, d.decided, d.reason, d.edits, d.lapsed): d for d in rows}
    found, idle = list(distinct.values()), [d for d in out if d.decided == "not needed"]
    most = max(idle, key=lambda d: d.already, default=None)
    if most and (not found or (most.already and all(d.decided == "refused" for d in found))):
        found.append(most)  # a patch that is in force in one part is not refused as a whole
    return found


def _around_served(decision: Decision, others: Iterable[Decision]) -> bool:
    """True if a submodel contains another one that a patch has not refused."""
    found = (o.submodel for o in others if o.decided != "refused" and o.submodel != decision.submodel)
    return any(inside(path, decision.submodel) for path in found if path and decision.submodel is not None)


def considered(entry: Entry, context: Context) -> bool:
    """True if a patch is to be decided about for a submodel; the others are told that no case proves it there.

    Those are the architectures that it supports; for a patch with `serves` also those that were tried, and those that
    can be: they have the structure, and transformers, or the user's own class, has a config for a tiny model.
    """
    submodel, structure = context.submodel, entry.patch.serves
    if submodel is None or submodel.architecture in entry.patch.but:
        return False
    if entry.serves(submodel.architecture):
        return True
    if structure is None:
        return False
    if structure.why_not(context):
        return submodel.architecture in entry.tried
    from transformers import CONFIG_MAPPING

    from hfpatch.model.embed import find_embedding
    from hfpatch.model.roles import own_class

    if any(case.branches for case in entry.patch.repros) and find_embedding(submodel.model) is None:
        return False  # such a case runs on token ids, so it can prove nothing of a tower

    theirs = not own_class(submodel.model).__module__.startswith("transformers.")
    return theirs or submodel.architecture in CONFIG_MAPPING


def _unlike(own: Decision, entry: Entry, context: Context, why_not: Refused, check: CheckProof) -> Decision:
    """Decide about a submodel without the structure that a patch serves: a proof may say that it needs none."""
    proof = check(entry, context)
    if isinstance(proof, NotNeeded):
        return replace(own, decided="not needed", reason=proof.reason, code=proof.code)
    return replace(own, reason=why_not.reason, hint=entry.patch.suggests, code=why_not.code)


def _excepted(entry: Entry, context: Context) -> Decision:
    """Decide about a submodel whose architecture is one of the patch's exceptions."""
    patch, submodel = entry.patch, context.submodel
    assert submodel is not None  # noqa: S101 - it has an architecture
    verdict, why = patch.condition(context), patch.but[submodel.architecture]
    unneeded = verdict if isinstance(verdict, NotNeeded) else why
    if isinstance(unneeded, NotNeeded):
        return Decision(entry.id, submodel.path, "not needed", unneeded.reason, code=unneeded.code)
    reason = f"{submodel.architecture}: {why}"
    return replace(_blank(entry, context), reason=reason, hint=patch.suggests, code="known-not-to-serve")


def _blank(entry: Entry, context: Context) -> Decision:
    """Return a refusal without a reason, to be filled in."""
    patch = entry.patch
    unasked = not callable(patch.effect) and patch.effect in UNASKED
    path = context.submodel.path if context.submodel else None
    vital = bool(patch.answers or patch.answers_where_it_edits)
    return Decision(entry.id, path, "refused", "", vital=vital, unasked=unasked, code="refused-here")


def _decide_one(entry: Entry, context: Context, check: CheckProof) -> list[Decision]:
    patch, own = entry.patch, _blank(entry, context)
    verdict = patch.condition(context)
    if isinstance(verdict, Refused):
        return [replace(own, reason=verdict.reason, hint=patch.suggests, code=verdict.code)]
    if isinstance(verdict, NotNeeded):
        if mine := _in_force(entry, context):
            return [_applied_already(own, mine)]
        return [replace(own, decided="not needed", reason=verdict.reason, code=verdict.code)]
    offered = verdict if isinstance(verdict, Offered) else None
    own = replace(own, unasked=own.unasked and not offered)
    if patch.serves and (why_not := patch.serves.why_not(context)):
        return [_unlike(own, entry, context, Refused(why_not, "no-such-place"), check)]
    found = _resolved(entry, context)
    if isinstance(found, Refused):
        return [replace(own, reason=found.reason, code=found.code)]
    grouped: dict[Effect, list[Edit]] = {}
    for edit in found.to_do:
        grouped.setdefault(_effect(entry, context, edit), []).append(edit)
    own = replace(own, already=found.done, otherwise=found.otherwise)
    if not grouped and not found.changed:
        if not found.done:
            nothing = f"none of its selections matched anything in {_place(context)}"
            return [replace(own, reason=nothing, hint=patch.suggests, code="no-such-place")]
        return [_applied_already(own, found.done)]
    unseen = any(e.change.unseen for e in (*found.to_do, *found.changed))
    if unseen and (reason := compiled_already(context.survey)):
        return [replace(own, reason=reason, lapsed=found.lapsed, code="compiled")]
    proof = check(entry, context)
    if isinstance(proof, NotNeeded):
        return [replace(own, decided="not needed", reason=proof.reason, code=proof.code)]
    if isinstance(proof, Refused):
        return [replace(own, reason=proof.reason, lapsed=found.lapsed, hint=patch.suggests, code=proof.code)]
    warnings = (proof and proof.reason, compiled_elsewhere(context.survey) if unseen else None)
    reason = "; ".join((verdict.reason, *filter(None, warnings)))
    out = [
        replace(
            own,
            decided="applied" if effect in UNASKED and not offered else "opt-in",
            reason=reason,
            effect=effect,
            edits=tuple(edits),
            hint=patch.suggests,
            suggested=offered is None or offered.suggested,
            lapsed=found.lapsed if any(e in found.again for e in edits) else "",
            code=verdict.code if offered or effect in UNASKED else "changes-the-function",
        )
        for effect, edits in grouped.items()
    ]
    if found.changed:
        edits = tuple(found.changed)
        effect = _effect(entry, context, edits[0])
        why = f"applied before, but {found.changed_to} now, which stays unless this patch is named"
        again = replace(own, decided="opt-in", reason=why, effect=effect, edits=edits, suggested=False, lapsed=why)
        out.append(replace(again, code="changed-since"))
    return out


def _resolved(entry: Entry, context: Context) -> _Resolved | Refused:
    """Return the edits of a patch by their state in the model; a refusal if one cannot be made or matches nothing."""
    found = _Resolved()
    for template in entry.patch.edits:
        try:
            edits = list(template.resolve(context))
        except RefusedError as error:
            return Refused(str(error), "property")
        if not edits and not template.where.may_be_empty:
            return Refused(f"{template.where} matched nothing in {_place(context)}", "no-such-place")
        for edit in edits:
            found.add(context.survey.root, entry.id, edit)
    return found


def _applied_already(own: Decision, edits: int) -> Decision:
    reason = f"already applied ({edits} edit{'' if edits == 1 else 's'})"
    return replace(own, decided="not needed", reason=reason, already=edits, code="already-applied")


class _Resolved:
    """The edits of one patch for one submodel, sorted by their present state in the model."""

    def __init__(self) -> None:
        self.to_do: list[Edit] = []
        self.again: list[Edit] = []
        """Those of `to_do` that were made before and are gone."""
        self.changed: list[Edit] = []
        """Edits that were made before and whose value was changed since."""
        self.done = 0
        self.otherwise = self.changed_to = ""

    @property
    def lapsed(self) -> str:
        """A sentence about edits that were made before and are gone; empty if there are none."""
        if not self.again:
            return ""
        first = self.again[0]
        record = record_at(first.module, first.change.place)
        count = f"{len(self.again)} of its edits are" if len(self.again) > 1 else "one of its edits is"
        patch = record.patch if record else "hfpatch"
        return f"{patch} was applied before and {count} gone, first {first.slot} of {first.path or 'the model itself'}"

    def add(self, root: nn.Module, patch: str, edit: Edit) -> None:
        """Add an edit, by its present state in the model."""
        there = record_at(edit.module, edit.change.place)
        if there is None or (there.patch != patch and there.change != edit.change):
            self.to_do.append(edit)  # another patch's record: if that is in force, the plan finds the conflict
            return
        state = state_of(root, edit.module, there)
        if state.in_force:
            self.done += 1
            if there.change != edit.change and not self.otherwise:
                place = f"{edit.slot} of {edit.path or 'the model itself'}"
                self.otherwise = (
                    f"{place} was set to {show(there.after)}, and would be set to {show(edit.after)} now: "
                    f"call hfpatch.revert(model, only={patch!r}) first to change it"
                )
        elif state.word == "changed":
            self.changed.append(edit)
            self.changed_to = self.changed_to or f"{edit.slot} of {edit.path or 'the model'!r} is {state.now}"
        else:
            self.to_do.append(edit)
            self.again.append(edit)


def _effect(entry: Entry, context: Context, edit: Edit) -> Effect:
    effect = entry.patch.effect
    return effect(context, Target(edit.path, edit.module)) if callable(effect) else effect


def opt_in(decision: Decision, named: bool) -> Decision:
    """Return a decision with `opt-in` resolved: applied if the caller named the patch, else with the line to type."""
    if decision.decided != "opt-in":
        return decision
    if named:
        return replace(decision, decided="applied")
    return replace(decision, hint=f'hfpatch.apply(model, include=["{decision.patch}"])')


def with_needed(ids: Iterable[str], entries: Mapping[str, Entry]) -> set[str]:
    """Return ids of patches with those of the patches that they need."""
    named = set(ids)
    return named.union(*(entries[i].patch.needs for i in named if i in entries))


def without_needed(survey: Survey, decisions: Sequence[Decision], entries: Mapping[str, Entry]) -> Iterator[Decision]:
    """Yield decisions; refused if a patch that the decided one needs is neither applied nor in force there."""
    for decision in decisions:
        needs = entries[decision.patch].patch.needs if decision.patch in entries and decision.edits else ()
        why = next(filter(None, (_missing(survey, decisions, need, decision.submodel) for need in needs)), None)
        refused = replace(decision, decided="refused", reason=why or "", effect=None, edits=(), code="needs-another")
        yield refused if why else decision


def _missing(survey: Survey, decisions: Sequence[Decision], need: str, submodel: str | None) -> str:
    """Return why a needed patch is neither applied to a submodel nor in force in it; empty if it is."""
    theirs = [d for d in decisions if d.patch == need and d.submodel in (submodel, None)]
    if any(d.decided == "applied" for d in theirs):
        return ""
    records = ((m, r) for _, m in survey.below(submodel or "") for r in records_of(m) if r.patch == need)
    if any(state_of(survey.root, module, record).in_force for module, record in records):
        return ""
    why = f"which is {theirs[0].decided} here: {theirs[0].reason}" if theirs else "which is not considered here"
    return f"it needs {need}, {why}"


def _in_force(entry: Entry, context: Context) -> int:
    """Return the number of edits of a patch that are in force: in the submodel, if the patch is decided for each."""
    root, modules = context.survey.root, context.survey.modules.items()
    found = context.survey.once(
        "records", lambda: [(p, r.patch) for p, m in modules for r in records_of(m) if state_of(root, m, r).in_force]
    )
    home = context.submodel.path if context.submodel and entry.patch.serves else ""
    return sum(patch == entry.id and inside(path, home) for path, patch in found)


def _version_refusal(entry: Entry) -> Decision | None:
    import transformers
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    have = Version(transformers.__version__)
    if entry.patch.fixed_in is not None and have >= Version(entry.patch.fixed_in):
        why = f"transformers {have} has this fixed (since {entry.patch.fixed_in})"
        return Decision("", None, "not needed", why, code="fixed-upstream")
    if not SpecifierSet(entry.patch.transformers).contains(have, prereleases=True):
        why = f"written for transformers {entry.patch.transformers}; installed is {have}"
        return Decision("", None, "refused", why, code="transformers-version")
    return None


def _place(context: Context) -> str:
    return context.submodel.place if context.submodel else type(context.survey.root).__name__


def _listed(architectures: Sequence[str]) -> str:
    return ", ".join(architectures[:6]) + (f" and {len(architectures) - 6} more" if len(architectures) > 6 else "")
