"""Plan -> undo log, all or nothing; and the way back, for whoever holds the handle and whoever lost it."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn

from hfpatch.errors import ApplyError, RevertError
from hfpatch.given import FLAG, want
from hfpatch.model.survey import Survey, root_module
from hfpatch.patching import registry
from hfpatch.patching.arguments import Names, ids, names
from hfpatch.patching.edits import Edit, do, forget, kind_of, records_of, show, undo
from hfpatch.patching.guards import compiled_already
from hfpatch.patching.kind import Record
from hfpatch.patching.language import UNASKED
from hfpatch.patching.plan import Decision, Plan, plan, sheet
from hfpatch.report import Sheet, say

if TYPE_CHECKING:
    import torch

    from hfpatch.patching.verify import Proof


@dataclass(frozen=True)
class Applied:
    """What an apply did. Printing it shows a table; as a context manager it reverts at the end.

    Attributes:
        model: The patched module, the one that was passed.
        plan: What was planned, decision by decision.
        id: Names this application in the records the model carries.
    """

    model: nn.Module
    plan: Plan
    id: str

    @property
    def edits(self) -> tuple[Edit, ...]:
        """What was changed, in order."""
        return self.plan.edits

    @property
    def new_parameters(self) -> tuple[nn.Parameter, ...]:
        """Parameters the patches added and the model still carries, for the optimizer."""
        return tuple(p for m, r in self.log() for p in kind_of(r.kind).added(self.model, m, r))

    def log(self) -> list[tuple[nn.Module, Record]]:
        """What of it the model carries now: each edited module with its undo-log entry, oldest first."""
        return [(module, record) for _, module, record in _log(self.model, self.id)]

    def revert(self) -> None:
        """Put back everything this application changed; a second call finds nothing to do.

        Tensors that a patch drew and that were trained since stay as they are, which is said; layers that a patch
        added go, trained or not, which is said too.

        Raises:
            RevertError: The model was compiled and called meanwhile, or something else was changed on top.
        """
        _undo_all(self.model, _log(self.model, self.id))

    def verify(self, batch: Mapping[str, Any]) -> Proof:
        """Run this model on this batch, before and after, against float32 with the same weights.

        Args:
            batch: Keyword arguments of the model: `input_ids [batch, tokens]` and what else it takes.

        Returns:
            Loss, KL and top-1 for: as it was, patched, and the stock alternatives. Prints as a table.

        Raises:
            InputError: The batch does not run, or the model returns no logits.
        """
        from hfpatch.patching.verify import prove

        return prove(self, batch)

    def sheet(self) -> Sheet:
        """As a table."""
        state = "Applied to" if self.log() or not self.edits else "Reverted on"
        return sheet(f"{state} {self.plan.model}", self.plan.decisions, self.plan.unknown)

    def __str__(self) -> str:
        return self.sheet().to_text()

    def _repr_html_(self) -> str:
        return self.sheet().to_html()

    def __enter__(self) -> Applied:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.revert()


@dataclass(frozen=True)
class Status:
    """The patches a model carries now, from the records on its modules. False where there are none."""

    model: str
    records: tuple[tuple[str, Record], ...]

    @property
    def patches(self) -> tuple[str, ...]:
        """Ids of the patches applied."""
        return tuple(dict.fromkeys(r.patch for _, r in self.records))

    def __bool__(self) -> bool:
        return bool(self.records)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "model": self.model,
            "patches": list(self.patches),
            "edits": [
                {
                    "path": p,
                    "patch": r.patch,
                    "slot": r.slot,
                    "before": show(r.before),
                    "after": show(r.after),
                }
                for p, r in self.records
            ],
        }

    def sheet(self) -> Sheet:
        """As a table."""
        rows = tuple(
            (patch, str(sum(r.patch == patch for _, r in self.records)), self._where(patch)) for patch in self.patches
        )
        notes = () if rows else ("no patch of hfpatch is applied",)
        return Sheet(f"Status of {self.model}", ("patch", "edits", "first at"), rows, notes, wide=("first at",))

    def _where(self, patch: str) -> str:
        return next(p or "the model itself" for p, r in self.records if r.patch == patch)

    def __str__(self) -> str:
        return self.sheet().to_text()

    def _repr_html_(self) -> str:
        return self.sheet().to_html()


def apply(
    model: object,
    *,
    verbose: bool = True,
    only: Names = None,
    include: Names = None,
    exclude: Names = None,
    added_modules: Any = None,
    compute_dtype: str | torch.dtype | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Applied:
    """Patch a loaded model in place.

    Without names it runs the patches whose condition holds for this model and whose effect is exact,
    equivalent or preparing; it adds no parameters and leaves alone what trained weights compute. What
    else there is stands in the plan, each with its reason and, if opt-in, the line to type.

    Args:
        model: A module, however wrapped, or an object whose `.model` is one (a Trainer).
        verbose: Say on stderr (rank 0) what was applied where, and what else is suggested.
        only: As for `hfpatch.plan`, like all that follow.
        include: As for `hfpatch.plan`.
        exclude: As for `hfpatch.plan`.
        added_modules: As for `hfpatch.plan`.
        compute_dtype: As for `hfpatch.plan`.
        options: As for `hfpatch.plan`.

    Returns:
        A handle: `.plan`, `.edits`, `.verify(batch)`, `.revert()`; also a context manager.

    Raises:
        ApplyError: An edit failed; those before it were undone.
        HfpatchError: As `hfpatch.plan`; nothing was changed.
    """
    want("apply", verbose=(verbose, FLAG))
    made = plan(
        model,
        only=only,
        include=include,
        exclude=exclude,
        added_modules=added_modules,
        compute_dtype=compute_dtype,
        options=options,
    )
    applied = carry_out(root_module(model), made)
    if verbose:
        say(announcement(applied))
    return applied


def carry_out(model: nn.Module, made: Plan) -> Applied:
    """Do what a plan says, all or nothing."""
    application = uuid.uuid4().hex
    try:
        for decision in made.of("applied"):
            for edit in decision.edits:
                _do(model, edit, application, decision)
    except BaseException:
        for _, module, record in reversed(_log(model, application)):
            undo(model, module, record)
        raise
    return Applied(model, made, application)


def _do(model: nn.Module, edit: Edit, application: str, decision: Decision) -> None:
    try:
        do(model, edit, application, decision.patch)
    except Exception as error:
        raise ApplyError(
            f"{decision.patch}: {edit.slot} of {edit.path or 'the model'!r} could not become {show(edit.after)} "
            f"({type(error).__name__}: {error}); everything was put back"
        ) from error


def announcement(applied: Applied) -> list[str]:
    """Two to four lines: what was applied where and with which effect, and what else there is."""
    by_patch: dict[str, list[Decision]] = {}
    for d in applied.plan.of("applied"):
        by_patch.setdefault(d.patch, []).append(d)
    done = [
        f"hfpatch: {patch} applied ({', '.join(sorted({str(d.effect) for d in ds}))}): "
        f"{_counted(sum(len(d.edits) for d in ds))} in {_places(ds)}; {ds[0].reason}"
        for patch, ds in by_patch.items()
    ]
    lines = done[:3]
    if len(done) > 3:
        lines[2] = f"hfpatch: and {len(done) - 2} more: {', '.join(list(by_patch)[2:])}"
    if not done:
        before = [d.patch for d in applied.plan.decisions if d.already]
        lines.append(f"hfpatch: nothing to apply{f'; already applied: {_listed(before)}' if before else ''}")
    opt_in = [d for d in applied.plan.of("opt-in") if d.suggested]
    refused = [d for d in applied.plan.of("refused") if registry.get(d.patch).patch.effect in UNASKED]
    if opt_in:
        lines.append(f"hfpatch: opt-in, not run unasked: {_listed(d.patch for d in opt_in)} ({opt_in[0].hint})")
    elif refused and not done:
        lines.append(f"hfpatch: refused: {refused[0].patch}: {refused[0].reason}")
    if len(lines) < 2:
        lines.append("hfpatch: print(handle) shows the plan; .verify(batch) proves it; .revert() undoes it")
    return lines


def status(model: object) -> Status:
    """Which patches a model carries now; also on a deepcopy or an unpickled model.

    Raises:
        NotAModelError: `model` holds no torch module.
    """
    root = root_module(model)
    found = tuple((path, record) for path, m in root.named_modules() for record in records_of(m))
    return Status(type(root).__name__, found)


def revert(model: object, *, only: Names = None, exclude: Names = None) -> None:
    """Undo what hfpatch did to a model, for whoever lost the handle; also on a deepcopy.

    Args:
        model: As for `hfpatch.apply`.
        only: Ids or globs of the patches to undo. What was set on top of a patch since is an obstacle, and a tensor
            trained since stays as it is, unless the patch is named here by its id: then that is thrown away.
        exclude: Ids or globs of the patches to keep.

    Raises:
        NotAModelError: `model` holds no torch module.
        UnknownPatchError: A name that matches no patch.
        RevertError: The model was compiled and called meanwhile, or something else was changed on top.
    """
    root = root_module(model)
    wanted = None if only is None else ids(only)
    kept = ids(exclude)
    log = [
        entry
        for entry in _log(root, None)
        if (wanted is None or entry[2].patch in wanted) and entry[2].patch not in kept
    ]
    _undo_all(root, log, named=set(names(only)))


def _log(model: nn.Module, application: str | None) -> list[tuple[str, nn.Module, Record]]:
    return [
        (path, module, record)
        for path, module in model.named_modules()
        for record in records_of(module)
        if application is None or record.application == application
    ]


def _undo_all(model: nn.Module, log: list[tuple[str, nn.Module, Record]], named: Collection[str] = frozenset()) -> None:
    unseen = next((text for _, _, r in log if (text := kind_of(r.kind).unseen)), "")
    if unseen and (reason := compiled_already(Survey(model))):
        raise RevertError(f"cannot be undone now: {reason}")
    trained: set[tuple[int, str]] = set()
    for path, module, r in log:
        kind = kind_of(r.kind)
        now = kind.changed(model, module, r)
        if now is None or r.patch in named:
            continue
        if not kind.trains:
            raise RevertError(
                f"changed since, so not put back: {path or 'the model'}: {r.slot} is {now}, hfpatch had set it to "
                f"{show(r.after)}. hfpatch.revert(model, exclude={r.patch!r}) leaves it as it is and undoes the rest, "
                f"hfpatch.revert(model, only={r.patch!r}) puts it back to what it was before the patch"
            )
        trained.add((id(module), r.patch))
    lines: dict[str, None] = {}
    for path, module, r in reversed(log):
        if (id(module), r.patch) in trained:
            lines[f"hfpatch: {r.patch}: {path or 'the model'} was trained since and stays as it is"] = None
            forget(module, r)
            continue
        lost = kind_of(r.kind).lost(model, module, r)
        undo(model, module, r)
        if lost is not None:
            lines[f"hfpatch: {r.patch} reverted: {lost}"] = None
    say(list(lines))


def _counted(edits: int) -> str:
    return f"{edits} edit" if edits == 1 else f"{edits} edits"


def _places(decisions: Iterable[Decision]) -> str:
    return ", ".join(dict.fromkeys(d.submodel or "the model" for d in decisions))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
