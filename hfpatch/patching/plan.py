"""Model + patches -> plan: what each patch would do to this model, decided and counted. Reads only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hfpatch.errors import ConflictError, RefusedError
from hfpatch.model.survey import inside
from hfpatch.patching import registry
from hfpatch.patching.arguments import Names, as_dtype, ids, names, settings
from hfpatch.patching.context import Context, Target
from hfpatch.patching.decision import Decision, Plan
from hfpatch.patching.edits import Edit
from hfpatch.patching.kinds.states import show
from hfpatch.patching.language import UNASKED, Effect, NotNeeded, Offered, Refused
from hfpatch.patching.record import record_at, records_of, state_of
from hfpatch.patching.registry import Entry
from hfpatch.patching.unserved import STREAM, all_within, unserved

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hfpatch.model.survey import Submodel, Survey
    from hfpatch.patching.kinds.base import Change

SUGGESTED = "suggested"


def plan(
    model: object,
    *,
    only: Names = None,
    include: Names = None,
    exclude: Names = None,
    added_modules: Any = None,
    compute_dtype: str | torch.dtype | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Plan:
    """Decide what each patch would do to a loaded model. Changes nothing.

    Args:
        model: A module, however wrapped (PEFT, DDP, compile), or an object whose `.model` is one (a Trainer).
        only: Ids or globs of the patches to consider; those whose condition holds are applied, opt-in ones too.
        include: Ids or globs of opt-in patches to apply as well; `"suggested"` for all whose condition holds.
        exclude: Ids or globs of patches to leave out.
        added_modules: Paths (globs) or modules that are your own additions, where they are not found by themselves.
        compute_dtype: A dtype the model will be run in and is not in yet.
        options: `{patch id: {name: value}}`.

    Raises:
        NotAModelError: `model` holds no torch module.
        UnknownPatchError: A name that matches no patch.
        PatchFileError: A name whose file does not load.
        ConflictError: Two patches want different things of the same place.
        InputError: Another argument cannot be used.
    """
    import torch

    from hfpatch.model.added import named_by_caller
    from hfpatch.model.survey import Survey

    survey = Survey(model, added_modules)
    entries = registry.entries()
    wanted = None if only is None else ids(only)
    asked = ids([n for n in names(include) if n != SUGGESTED]) | (wanted or set())
    list(named_by_caller(survey))  # a wrong name is an error even if no patch looks
    excluded = ids(exclude)
    dtype = as_dtype(compute_dtype)
    chosen_options = settings(entries, options)
    decisions: list[Decision] = []
    for entry in entries.values():
        if wanted is not None and entry.id not in wanted:
            continue
        if entry.id in excluded:
            decisions.append(Decision(entry.id, None, "not needed", "left out by exclude= (--exclude)"))
            continue
        chosen = {**entry.patch.options, **chosen_options.get(entry.id, {})}
        # conditions and repros run code of their own, whose dtypes are not those of the caller's region
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            decisions.extend(_decide(entry, survey, dtype, chosen))
    if STREAM in entries and (wanted is None or STREAM in wanted) and STREAM not in excluded:
        rows = _not_served(survey, dtype, decisions)
        beside = (d for d in decisions if not (rows and d.patch == STREAM and d.vital is None))  # the rows say more
        decisions = [*beside, *rows]
    everything = SUGGESTED in names(include)
    decided = tuple(_ask(d, d.patch in asked or (everything and d.suggested)) for d in decisions)
    _check_conflicts(survey.root, decided)
    return Plan(type(survey.root).__name__, decided, _unknown(survey, dtype), frozenset(asked))


def _not_served(survey: Survey, dtype: torch.dtype | None, decisions: Iterable[Decision]) -> list[Decision]:
    """A refusal for each stack that runs in float16 and that no patch serves, where none of the decisions says so."""
    served = {d.submodel for d in decisions if d.patch == STREAM and d.decided != "refused"}
    if all_within(survey, [s.path for at, stacks in survey.stacks.items() if at in served for s in stacks]):
        return []
    said = [d.submodel for d in decisions if d.patch == STREAM and d.decided == "refused" and d.submodel is not None]
    return [
        Decision(STREAM, row.path, "refused", row.sentence, vital=True, unasked=True)
        for row in unserved(survey, dtype)
        if not any(row.refused and inside(row.path, path) for path in said)
    ]


def plan_alone(entry: Entry, model: object, *, asked: bool) -> Plan:
    """The plan of one patch, named (`asked`) or not, its upstream bodies trusted unseen: for its own cases."""
    from hfpatch.model.survey import Survey

    survey = Survey(model)
    decided = _decide(entry, survey, None, entry.patch.options, trusted=True)
    return Plan(type(survey.root).__name__, tuple(_ask(d, asked) for d in decided))


def _decide(
    entry: Entry,
    survey: Survey,
    compute_dtype: torch.dtype | None,
    options: Mapping[str, Any],
    *,
    trusted: bool = False,
) -> list[Decision]:
    patch = entry.patch
    refusal = _version_refusal(entry)
    if refusal is not None:
        return [replace(refusal, patch=entry.id)]
    served: list[Submodel | None] = [s for s in survey.submodels if entry.serves(s.architecture)]
    if patch.whole:
        served = [None]
    out: list[Decision] = []
    for submodel in served:
        context = Context(survey, submodel, compute_dtype, options)
        out.extend(_decide_one(entry, context, trusted))
    for submodel in survey.submodels:
        if submodel.architecture in patch.refuses:
            out.append(_known(entry, Context(survey, submodel, compute_dtype, options)))
    if not out:
        have = ", ".join(sorted({s.architecture for s in survey.submodels})) or "no transformers model"
        why = f"does not serve {have}: no case proves it there; serves {_listed(patch.architectures)}"
        out.append(Decision(entry.id, None, "refused", why, hint=patch.suggests, vital=None))
    # Of several submodels, those it has nothing to do with are not worth a row each.
    telling = {(d.decided, d.reason, d.edits, d.lapsed): d for d in out if d.decided != "not needed" or d.lapsed}
    return list(telling.values()) or [max(out, key=lambda d: d.already)]


def _known(entry: Entry, context: Context) -> Decision:
    """Decide about an architecture that a patch knows and does not serve."""
    patch, submodel = entry.patch, context.submodel
    assert submodel is not None  # noqa: S101 - it has an architecture
    verdict = patch.condition(context)
    if isinstance(verdict, NotNeeded):
        return Decision(entry.id, submodel.path, "not needed", verdict.reason)
    reason = f"{submodel.architecture}: {patch.refuses[submodel.architecture]}"
    return replace(_blank(entry, context), reason=reason, hint=patch.suggests)


def _blank(entry: Entry, context: Context) -> Decision:
    """A refusal without a reason yet."""
    patch = entry.patch
    unasked = not callable(patch.effect) and patch.effect in UNASKED
    path = context.submodel.path if context.submodel else None
    return Decision(entry.id, path, "refused", "", vital=bool(patch.answers), unasked=unasked)


def _decide_one(entry: Entry, context: Context, trusted: bool) -> list[Decision]:
    from hfpatch.patching.preconditions import compiled_already, compiled_elsewhere, drift_verdict

    patch, own = entry.patch, _blank(entry, context)
    verdict = patch.condition(context)
    if isinstance(verdict, Refused):
        return [replace(own, reason=verdict.reason, hint=patch.suggests)]
    if isinstance(verdict, NotNeeded):
        mine = _in_force(context)[entry.id]
        reason = _applied_already(mine) if mine else verdict.reason
        return [replace(own, decided="not needed", reason=reason, already=mine)]
    found = Resolved()
    for template in patch.edits:
        try:
            resolved = list(template.resolve(context))
        except RefusedError as error:
            return [replace(own, reason=str(error))]
        if not resolved and not template.where.may_be_empty:
            return [replace(own, reason=f"{template.where} matched nothing in {_place(context)}")]
        for edit in resolved:
            found.sort_in(context.survey.root, entry.id, edit)
    grouped: dict[Effect, list[Edit]] = {}
    for edit in found.to_do:
        grouped.setdefault(_effect(entry, context, edit), []).append(edit)
    own = replace(own, already=found.done, otherwise=found.otherwise)
    if not grouped and not found.changed:
        return [replace(own, decided="not needed", reason=_applied_already(found.done))]
    unseen = any(e.change.unseen for e in (*found.to_do, *found.changed))
    if unseen and (reason := compiled_already(context.survey)):
        return [replace(own, reason=reason, lapsed=found.lapsed)]
    drift = None if trusted else drift_verdict(entry, context)
    if isinstance(drift, Refused):
        return [replace(own, reason=drift.reason, lapsed=found.lapsed)]
    warnings = (drift and drift.reason, compiled_elsewhere(context.survey) if unseen else None)
    reason = "; ".join((verdict.reason, *filter(None, warnings)))
    offered = verdict if isinstance(verdict, Offered) else None
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
        )
        for effect, edits in grouped.items()
    ]
    if found.changed:
        edits = tuple(found.changed)
        effect = _effect(entry, context, edits[0])
        why = f"applied before; {found.changed_to} since, which stays unless this patch is asked for by name"
        out.append(replace(own, decided="opt-in", reason=why, effect=effect, edits=edits, suggested=False, lapsed=why))
    return out


def _applied_already(edits: int) -> str:
    return f"already applied ({edits} edit{'' if edits == 1 else 's'})"


class Resolved:
    """The edits of one patch for one submodel, by what the model carries of them already."""

    def __init__(self) -> None:
        self.to_do: list[Edit] = []
        self.again: list[Edit] = []
        """Of these, those that were made before and are gone."""
        self.changed: list[Edit] = []
        """Made before, and somebody has set something else since."""
        self.done = 0
        self.otherwise = self.changed_to = ""

    @property
    def lapsed(self) -> str:
        """Return a sentence about edits that were made before and are gone."""
        if not self.again:
            return ""
        first = self.again[0]
        record = record_at(first.module, first.change.place)
        count = f"{len(self.again)} of its edits are" if len(self.again) > 1 else "one of its edits is"
        patch = record.patch if record else "hfpatch"
        return f"{patch} was applied before and {count} gone, first {first.slot} of {first.path or 'the model itself'}"

    def sort_in(self, root: nn.Module, patch: str, edit: Edit) -> None:
        """Look what the model carries of an edit, and what has become of it."""
        there = record_at(edit.module, edit.change.place)
        if there is None or (there.patch != patch and there.change != edit.change):
            self.to_do.append(edit)  # another patch's: whether that is in force is a matter of conflicts
            return
        state = state_of(root, edit.module, there)
        if state.in_force:
            self.done += 1
            if there.change != edit.change and not self.otherwise:
                place = f"{edit.slot} of {edit.path or 'the model itself'}"
                self.otherwise = (
                    f"{place} was set to {show(there.after)} then, and would be set to {show(edit.after)} now: "
                    f"hfpatch.revert(model, only={patch!r}) first, to have that"
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


def _ask(decision: Decision, asked: bool) -> Decision:
    if decision.decided != "opt-in":
        return decision
    if asked:
        return replace(decision, decided="applied")
    return replace(decision, hint=f'hfpatch.apply(model, include=["{decision.patch}"])')


def _unknown(survey: Survey, compute_dtype: torch.dtype | None) -> tuple[str, ...]:
    first = next(survey.root.parameters(), None)
    if first is None or not first.is_meta:
        return ()
    notes = ["weights are not loaded: whether added modules are trained is unknown"]
    if compute_dtype is None:
        notes.append(
            f"planned for {str(first.dtype).removeprefix('torch.')}; compute_dtype= (--compute-dtype) plans for another"
        )
    return tuple(notes)


def _check_conflicts(root: nn.Module, decisions: Iterable[Decision]) -> None:
    taken: dict[tuple[int, Hashable], tuple[str, Change]] = {}
    for decision in decisions:
        if decision.decided != "applied":
            continue
        for edit in decision.edits:
            there = record_at(edit.module, edit.change.place)
            theirs = there if there is not None and there.patch != decision.patch else None
            in_force = theirs is not None and state_of(root, edit.module, theirs).in_force
            place = id(edit.module), edit.change.place
            other = (theirs.patch, theirs.change) if theirs and in_force else taken.get(place)
            if other is not None and other[1] != edit.change:
                raise ConflictError(
                    f"{decision.patch} wants {edit.slot} of {edit.path or 'the model'!r} to be {show(edit.after)}, "
                    f"{other[0]} wants {show(other[1].after)}: leave one out with exclude="
                )
            taken[place] = (decision.patch, edit.change)


def _in_force(context: Context) -> Counter[str]:
    """How many edits of each patch the object carries that are in force."""
    root, modules = context.survey.root, context.survey.modules.values()
    return context.survey.once(
        "records", lambda: Counter(r.patch for m in modules for r in records_of(m) if state_of(root, m, r).in_force)
    )


def _version_refusal(entry: Entry) -> Decision | None:
    import transformers
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    have = Version(transformers.__version__)
    if entry.patch.fixed_in is not None and have >= Version(entry.patch.fixed_in):
        return Decision("", None, "not needed", f"transformers {have} has this fixed (since {entry.patch.fixed_in})")
    if not SpecifierSet(entry.patch.transformers).contains(have, prereleases=True):
        return Decision(
            "", None, "refused", f"written for transformers {entry.patch.transformers}; installed is {have}"
        )
    return None


def _place(context: Context) -> str:
    return context.submodel.place if context.submodel else type(context.survey.root).__name__


def _listed(architectures: Sequence[str]) -> str:
    return ", ".join(architectures[:6]) + (f" and {len(architectures) - 6} more" if len(architectures) > 6 else "")
