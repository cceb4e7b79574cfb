"""Makes the decisions of a plan: what each patch would do to a model. Only reads the model."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from hfpatch.dtypes import dtype_name
from hfpatch.errors import ConflictError, InputError
from hfpatch.given import shown
from hfpatch.model.walk import inside
from hfpatch.patching import registry
from hfpatch.patching.arguments import Names, as_dtype, ids, names, settings
from hfpatch.patching.deciding import decide, opt_in, with_needed, without_needed
from hfpatch.patching.decision import Decision, Decisions
from hfpatch.patching.kinds.states import show
from hfpatch.patching.proofs.lookup import proof_verdict
from hfpatch.patching.record import record_at, state_of
from hfpatch.patching.registering import foreign
from hfpatch.patching.registering.installed import of_packages
from hfpatch.patching.unserved import STREAM, all_within, unserved

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hfpatch.inspecting.peaks import Peaks
    from hfpatch.model.survey import Survey
    from hfpatch.patching.kinds.base import Change

SUGGESTED = "suggested"
WIDENERS = (STREAM, "wo-overflow")
"""The patches that widen a residual stream: they are applied without a measured need, and say the room."""


def decisions(
    model: object,
    *,
    only: Names = None,
    include: Names = None,
    exclude: Names = None,
    added_modules: Any = None,
    compute_dtype: str | torch.dtype | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    trust: Names = None,
    prove: Literal["own"] | None = None,
    batch: Mapping[str, Any] | None = None,
) -> Decisions:
    """Decide what each patch would do to a loaded model. Changes nothing. See `hfpatch.plan`."""
    import torch

    from hfpatch.model.added import named_by_caller
    from hfpatch.model.survey import Survey

    if prove not in (None, "own"):
        raise InputError(f'plan: want "own" or None as prove=, got {shown(prove)}')
    survey = Survey(model, added_modules)
    entries = registry.entries()
    wanted = None if only is None else with_needed(ids(only), entries)
    asked = ids([n for n in names(include) if n != SUGGESTED]) | (wanted or set())
    list(named_by_caller(survey))  # a wrong name is an error even if no patch looks
    excluded = ids(exclude)
    dtype = as_dtype(compute_dtype)
    peaks, unusable = _need(survey, batch)
    trusted = of_packages(names(trust, "trust= takes names of installed packages"))
    considered = asked | trusted if wanted is None else wanted
    entries, found = foreign.loaded(entries, considered - excluded, trusted)
    chosen_options = settings(entries, options)
    for entry in entries.values():
        if wanted is not None and entry.id not in wanted:
            continue
        if entry.id in excluded:
            found.append(Decision(entry.id, None, "not needed", "left out by exclude= (--exclude)", code="excluded"))
            continue
        chosen = {**entry.patch.options, **chosen_options.get(entry.id, {})}
        # conditions and repros run models, whose dtypes, devices and gradients must not depend on the caller's contexts
        with (
            torch.inference_mode(mode=False),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
            torch.device("cpu"),
        ):
            check = partial(proof_verdict, own=prove == "own" or entry.id in asked)
            made = foreign.guarded(entry, partial(decide, entry, survey, dtype, chosen, check, peaks))
            found.extend(replace(d, options=chosen_options.get(entry.id, {})) for d in made)
    if STREAM in entries and (wanted is None or STREAM in wanted) and STREAM not in excluded:
        rows = _not_served(survey, dtype, found)
        beside = (d for d in found if not (rows and d.patch == STREAM and d.vital is None))  # the rows say more
        found = [*beside, *rows]
    if peaks is not None:
        found = [_with_room(survey, peaks, d) for d in found]
    everything = SUGGESTED in names(include)
    decided = tuple(opt_in(d, d.patch in asked or (everything and d.suggested)) for d in found)
    decided = tuple(without_needed(survey, decided, entries))
    _check_conflicts(survey.root, decided)
    left_out = foreign.left_out({*entries, *considered}) if wanted is None else ()
    unknown = (*filter(None, [unusable]), *_unknown(survey, dtype), *left_out)
    measured = None if batch is None else peaks
    return Decisions(type(survey.root).__name__, decided, unknown, frozenset(asked), measured)


def _need(survey: Survey, batch: Mapping[str, Any] | None) -> tuple[Peaks | None, str]:
    """Return what the model reaches on a batch, else what was kept beside its checkpoint; why that is not used."""
    if batch is None:
        from hfpatch.patching.verifying.kept_need import kept_need

        return kept_need(survey)
    from hfpatch.patching.verifying.need import measure

    return measure(survey.root, batch), ""


def _with_room(survey: Survey, peaks: Peaks, decision: Decision) -> Decision:
    """Return a decision about a residual stream with what the stream reaches on the caller's batch."""
    if decision.patch not in WIDENERS or decision.decided == "refused" or decision.submodel is None:
        return decision
    peak = peaks.stream(survey.stacks.get(decision.submodel, ()))
    return replace(decision, reason=f"{decision.reason}; it {peak or f'did not run {peaks.seen}'}")


def _not_served(survey: Survey, dtype: torch.dtype | None, decisions: Iterable[Decision]) -> list[Decision]:
    """Return a refusal for each float16 stack that no patch supports and that no decision is about yet."""
    served = {d.submodel for d in decisions if d.patch == STREAM and d.decided != "refused"}
    if all_within(survey, [s.path for at, stacks in survey.stacks.items() if at in served for s in stacks]):
        return []
    said = [d.submodel for d in decisions if d.patch == STREAM and d.decided == "refused" and d.submodel is not None]
    return [
        Decision(STREAM, row.path, "refused", row.sentence, vital=True, unasked=True, code="not-served")
        for row in unserved(survey, dtype)
        if not any(row.refused and inside(row.path, path) for path in said)
    ]


def _unknown(survey: Survey, compute_dtype: torch.dtype | None) -> tuple[str, ...]:
    first = next(survey.root.parameters(), None)
    if first is None or not first.is_meta:
        return ()
    notes = ["the weights are not loaded, so it is unknown whether added modules are trained"]
    if compute_dtype is None:
        notes.append(f"planned for {dtype_name(first.dtype)}; compute_dtype= (--compute-dtype) plans for another")
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
                    f"{other[0]} wants {show(other[1].after)}: leave out one of them with exclude="
                )
            taken[place] = (decision.patch, edit.change)
