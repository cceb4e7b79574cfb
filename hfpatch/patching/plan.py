"""Model + patches -> plan: what each patch would do to this model, decided and counted. Reads only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hfpatch.errors import ConflictError, RefusedError
from hfpatch.patching import registry
from hfpatch.patching.arguments import Names, as_dtype, ids, names, settings
from hfpatch.patching.context import Context, Target
from hfpatch.patching.edits import Edit, kind_of, records_of, show
from hfpatch.patching.kind import Record
from hfpatch.patching.language import UNASKED, Decided, Effect, NotNeeded, Offered, Refused
from hfpatch.patching.registry import Entry
from hfpatch.report import Sheet

if TYPE_CHECKING:
    import torch

    from hfpatch.model.survey import Submodel, Survey

SUGGESTED = "suggested"
ORDER: tuple[Decided, ...] = ("applied", "opt-in", "refused", "not needed")


@dataclass(frozen=True)
class Decision:
    """What one patch would do to one submodel.

    Attributes:
        patch: Its id.
        submodel: Path of the submodel it is about; None where it is about the object as a whole.
        decided: applied | not needed | opt-in | refused.
        reason: Why.
        effect: On outputs; None where nothing would be done.
        edits: What would be changed.
        hint: The line to type, or an alternative.
        already: Number of edits of this patch that the model carries from before.
        suggested: Opt-in because it mends something here, and not just because it can be run.
    """

    patch: str
    submodel: str | None
    decided: Decided
    reason: str
    effect: Effect | None = None
    edits: tuple[Edit, ...] = ()
    hint: str = ""
    already: int = 0
    suggested: bool = True

    @property
    def what(self) -> str:
        """The edits in short: count, example path, before -> after."""
        groups: dict[tuple[str, str, str], list[str]] = {}
        for e in self.edits:
            groups.setdefault((e.slot, show(e.before), show(e.after)), []).append(e.path)
        parts: list[str] = []
        for (slot, before, after), paths in groups.items():
            change = f"{slot} -> {after}" if before == "-" else f"{slot} {before} -> {after}"
            parts.append(f"{len(paths)} x {change}: {_example(paths)}")
        return "\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "patch": self.patch,
            "submodel": self.submodel,
            "decision": self.decided,
            "reason": self.reason,
            "effect": self.effect,
            "hint": self.hint,
            "suggested": self.suggested,
            "edits": [e.to_dict() for e in self.edits],
        }


@dataclass(frozen=True)
class Plan:
    """What a set of patches would do to a model. Printing it shows a table."""

    model: str
    decisions: tuple[Decision, ...]
    unknown: tuple[str, ...] = ()
    """What could not be known, e.g. because the weights are not loaded."""

    @property
    def edits(self) -> tuple[Edit, ...]:
        """Everything that apply would change, in order."""
        return tuple(e for d in self.decisions if d.decided == "applied" for e in d.edits)

    def of(self, decided: Decided) -> tuple[Decision, ...]:
        """The decisions of one kind."""
        return tuple(d for d in self.decisions if d.decided == decided)

    def sheet(self) -> Sheet:
        """As a table."""
        return sheet(f"Plan for {self.model}", self.decisions, self.unknown)

    def to_dict(self) -> dict[str, Any]:
        """As JSON: model, decisions (patch, submodel, decision, reason, effect, hint, edits), unknown."""
        return {
            "model": self.model,
            "decisions": [d.to_dict() for d in self.decisions],
            "unknown": list(self.unknown),
        }

    def __str__(self) -> str:
        return self.sheet().to_text()

    def _repr_html_(self) -> str:
        return self.sheet().to_html()


def sheet(title: str, decisions: Iterable[Decision], notes: Sequence[str] = ()) -> Sheet:
    """Decisions as a table: patch, decision, what changes where, effect. What is done comes first."""
    rows: list[tuple[str, ...]] = []
    for d in sorted(decisions, key=lambda d: (ORDER.index(d.decided), not d.suggested)):
        text = "\n".join(t for t in (d.what if d.decided in ("applied", "opt-in") else "", d.reason, d.hint) if t)
        where = f"{d.patch}\n  {d.submodel}" if d.submodel else d.patch
        rows.append((where, d.decided, d.effect or "-", text))
    return Sheet(
        title,
        ("patch", "decision", "effect", "what changes, and why"),
        tuple(rows),
        tuple(notes),
        wide=("what changes, and why",),
    )


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
        RefusedError: A patch named in `only=` does not go with this model.
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
    everything = SUGGESTED in names(include)
    decided = tuple(_ask(d, d.patch in asked or (everything and d.suggested)) for d in decisions)
    _check_asked(decided, set(names(only)))
    _check_conflicts(decided)
    return Plan(type(survey.root).__name__, decided, _unknown(survey, dtype))


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
    known = [s for s in survey.submodels if s.architecture in patch.refuses]
    out.extend(
        Decision(entry.id, s.path, "refused", f"{s.architecture}: {patch.refuses[s.architecture]}") for s in known
    )
    if not out:
        have = ", ".join(sorted({s.architecture for s in survey.submodels})) or "no transformers model"
        why = f"does not serve {have}: no case proves it there; serves {_listed(patch.architectures)}"
        out.append(Decision(entry.id, None, "refused", why, hint=patch.suggests))
    # Of several submodels, those it has nothing to do with are not worth a row each.
    telling = {(d.decided, d.reason, d.edits): d for d in out if d.decided != "not needed"}
    return list(telling.values()) or out[:1]


def _decide_one(entry: Entry, context: Context, trusted: bool) -> list[Decision]:
    from hfpatch.patching.guards import compiled_already, compiled_elsewhere, drift_verdict

    patch, path = entry.patch, context.submodel.path if context.submodel else None
    verdict = patch.condition(context)
    if isinstance(verdict, Refused):
        return [Decision(entry.id, path, "refused", verdict.reason, hint=patch.suggests)]
    if isinstance(verdict, NotNeeded):
        mine = _records(context, entry.id)
        reason = f"already applied ({mine} edits)" if mine else verdict.reason
        return [Decision(entry.id, path, "not needed", reason, already=mine)]
    grouped: dict[Effect, list[Edit]] = {}
    done = 0
    for template in patch.edits:
        try:
            resolved = list(template.resolve(context))
        except RefusedError as error:
            return [Decision(entry.id, path, "refused", str(error))]
        if not resolved and not template.where.may_be_empty:
            return [Decision(entry.id, path, "refused", f"{template.where} matched nothing in {_place(context)}")]
        for edit in resolved:
            there = next((r for r in records_of(edit.module) if r.slot == edit.slot), None)
            if there is not None and there.after == edit.after:
                kind = kind_of(there.kind)
                now = None if kind.trains else kind.changed(context.survey.root, edit.module, there)
                if now is not None:
                    return [
                        Decision(
                            entry.id,
                            path,
                            "refused",
                            f"applied before, but {edit.slot} of {edit.path or 'the model'!r} is {now} since: call "
                            f"hfpatch.revert(model, only={entry.id!r}) first",
                        )
                    ]
                done += 1
                continue
            grouped.setdefault(_effect(entry, context, edit), []).append(edit)
    if not grouped:
        return [Decision(entry.id, path, "not needed", f"already applied ({done} edits)", already=done)]
    unseen = any(kind_of(e.kind).unseen for edits in grouped.values() for e in edits)
    if unseen and (reason := compiled_already(context.survey)):
        return [Decision(entry.id, path, "refused", reason)]
    drift = None if trusted else drift_verdict(entry, context)
    if isinstance(drift, Refused):
        return [Decision(entry.id, path, "refused", drift.reason)]
    warnings = (drift and drift.reason, compiled_elsewhere(context.survey) if unseen else None)
    reason = "; ".join((verdict.reason, *filter(None, warnings)))
    offered = verdict if isinstance(verdict, Offered) else None
    return [
        Decision(
            entry.id,
            path,
            "applied" if effect in UNASKED and not offered else "opt-in",
            reason,
            effect,
            tuple(edits),
            patch.suggests,
            suggested=offered is None or offered.suggested,
        )
        for effect, edits in grouped.items()
    ]


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


def _check_asked(decisions: Iterable[Decision], named: set[str]) -> None:
    """A patch named by its id must not be refused; one that only a glob names may be."""
    by_patch: dict[str, list[Decision]] = {}
    for d in decisions:
        by_patch.setdefault(d.patch, []).append(d)
    for patch_id, mine in by_patch.items():
        if patch_id in named and all(d.decided == "refused" for d in mine):
            raise RefusedError(f"{patch_id} was asked for and is refused: {'; '.join(d.reason for d in mine)}")


def _check_conflicts(decisions: Iterable[Decision]) -> None:
    taken: dict[tuple[int, str], tuple[str, Any]] = {}
    for decision in decisions:
        if decision.decided != "applied":
            continue
        for edit in decision.edits:
            there: list[Record] = [r for r in records_of(edit.module) if r.slot == edit.slot]
            other = (there[0].patch, there[0].after) if there else taken.get((id(edit.module), edit.slot))
            if other is not None and other[1] != edit.after:
                raise ConflictError(
                    f"{decision.patch} wants {edit.slot} of {edit.path or 'the model'!r} to be {show(edit.after)}, "
                    f"{other[0]} wants {show(other[1])}: leave one out with exclude="
                )
            taken[id(edit.module), edit.slot] = (decision.patch, edit.after)


def _records(context: Context, patch_id: str) -> int:
    """How many edits of a patch the object carries."""
    modules = context.survey.modules.values()
    return context.survey.once("records", lambda: Counter(r.patch for m in modules for r in records_of(m)))[patch_id]


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


def _example(paths: Sequence[str]) -> str:
    """Where, in short: paths that differ in list indices only are one, with a star."""
    from hfpatch.model.survey import starred

    kinds: dict[str, list[str]] = {}
    for path in paths:
        kinds.setdefault(starred(path), []).append(path)
    named = [alike[0] if len(alike) == 1 else generic for generic, alike in kinds.items()]
    named.sort(key=lambda path: (path.count("."), path))
    return ", ".join(path or "the model itself" for path in named)


def _listed(architectures: Sequence[str]) -> str:
    return ", ".join(architectures[:6]) + (f" and {len(architectures) - 6} more" if len(architectures) > 6 else "")
