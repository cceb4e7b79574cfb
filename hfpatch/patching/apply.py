"""`plan` decides what each patch would do and changes nothing; `apply` patches the model, all or nothing."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hfpatch.errors import InputError, RefusedError, StalePlanError
from hfpatch.given import FLAG, PATH, optional, want
from hfpatch.model.walk import root_module
from hfpatch.patching.announce import announcement
from hfpatch.patching.applied import Applied
from hfpatch.patching.arguments import Names, names
from hfpatch.patching.decision import Decisions
from hfpatch.patching.plan import decisions
from hfpatch.patching.preconditions.difference import difference
from hfpatch.patching.undo import one_at_a_time
from hfpatch.patching.writing import carry_out
from hfpatch.report import say

if TYPE_CHECKING:
    from os import PathLike

    import torch
    from torch import nn


@dataclass(frozen=True)
class Origin:
    """The source of a plan.

    Attributes:
        model: A weak reference to the model.
        arguments: The other arguments of `hfpatch.plan`.
    """

    model: weakref.ref[nn.Module]
    arguments: Mapping[str, Any]


@dataclass(frozen=True, repr=False)
class Plan(Decisions):
    """The decisions about a set of patches for a model. Printing it shows a table, `apply()` applies it.

    Attributes:
        origin: The model and arguments it was made from; None for a copied or unpickled plan.
    """

    origin: Origin | None = field(default=None, compare=False)

    def apply(self, *, verbose: bool = True) -> Applied:
        """Apply this plan to the model it was made for, if the same plan still results for it.

        The plan is made again and compared with this one. A plan holds the modules that its edits would change, but
        only a weak reference to the model, so keep a reference to the model yourself.

        Args:
            verbose: As for `hfpatch.apply`.

        Returns:
            The handle, as `hfpatch.apply` returns it.

        Raises:
            StalePlanError: The model has changed or no longer exists, or this plan is a copy; nothing was changed.
            ApplyError: An edit failed; the edits before it were undone.
            HfpatchError: As for `hfpatch.apply`.
        """
        want("plan.apply", verbose=(verbose, FLAG))
        model = None if self.origin is None else self.origin.model()
        if self.origin is None or model is None:
            copied = "is a copy, which has no reference to the model"
            why = copied if self.origin is None else f"is for a {self.model} that no longer exists"
            raise StalePlanError(f"plan.apply: this plan {why}; make a new plan: hfpatch.plan(model)")
        with one_at_a_time():
            now = plan(model, **self.origin.arguments)
            if (changed := difference(self, now)) is not None:
                raise StalePlanError(
                    f"plan.apply: the {self.model} has changed since this plan was made: {changed}; nothing was "
                    "applied; make a new plan: hfpatch.plan(model)"
                )
            return _applied(now, model, self.origin.arguments["only"], verbose=verbose)

    def keep(self) -> Path:
        """Keep what `batch=` has measured beside the checkpoint that the model was loaded from, and return the file.

        Later plans of a model that is loaded from there decide with it, in any dtype, as long as its weights are the
        same. The file `hfpatch-measured.json` holds no text of the batch. The model must be as it was measured.

        Raises:
            InputError: The plan was made without a batch or is a copy, the model no longer exists or was not loaded
                from a directory, or the file cannot be written there.
        """
        from hfpatch.patching.verifying.kept_need import keep_need

        model = None if self.origin is None else self.origin.model()
        if self.origin is None or model is None or self.measured is None:
            raise InputError("plan.keep: want a plan that hfpatch.plan(model, batch=batch) has made, and its model")
        return keep_need(model, self.measured, self.origin.arguments["batch"])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "origin": None}  # a reference to a model cannot be copied


def plan(
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
) -> Plan:
    """Decide what each patch would do to a loaded model. Changes nothing.

    Args:
        model: A module, wrapped or not (PEFT, DDP, compile), or an object whose `.model` is one (a Trainer).
        only: Ids or globs of the patches to consider; those whose condition holds are applied, opt-in ones too.
        include: Ids or globs of opt-in patches to apply too; `"suggested"` for every opt-in patch that fixes something
            in this model.
        exclude: Ids or globs of patches to leave out.
        added_modules: Paths (globs) or modules that you added, if they are not detected.
        compute_dtype: The dtype the model will run in, if its weights have another one now.
        options: Options of patches: `{patch id: {name: value}}`.
        trust: Names of installed packages whose patches are imported and planned too. A patch of an installed package
            is imported otherwise only if `only` or `include` names it. It is opt-in, whatever its effect.
        prove: `"own"` to try patches on model classes of your own too, as naming a patch in `only` or `include` does. A
            tiny model of your class is built from its config, offline, in another process with a time limit of 120 s.
        batch: Keyword arguments of the model, to measure the need: it is run once, without a gradient and with float32
            weights, and decisions say how near float16's maximum its values come. An opt-in patch whose fault the batch
            shows is applied. Without it, a measurement that `Plan.keep` left beside the model's checkpoint is used.

    Returns:
        The plan. Prints as a table.

    Raises:
        NotAModelError: `model` holds no torch module.
        UnknownPatchError: A name matches no patch.
        PatchFileError: The file of a named patch of hfpatch itself does not load. If the code of an installed package's
            patch fails, that patch is refused.
        ConflictError: Two patches want different values in the same place.
        InputError: Another argument is invalid.
    """
    arguments: dict[str, Any] = {
        "only": only,
        "include": include,
        "exclude": exclude,
        "added_modules": added_modules,
        "compute_dtype": compute_dtype,
        "options": options,
        "trust": trust,
        "prove": prove,
        "batch": batch,
    }
    made = decisions(model, **arguments)
    origin = Origin(weakref.ref(root_module(model)), arguments)
    return Plan(made.model, made.decisions, made.unknown, made.named, made.measured, origin)


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
    trust: Names = None,
    prove: Literal["own"] | None = None,
    batch: Mapping[str, Any] | None = None,
    manifest: str | PathLike[str] | None = None,
) -> Applied:
    """Patch a loaded model in place.

    By default it applies the patches whose condition holds for this model and whose effect is `exact`,
    `equivalent` or `prepares`; these add no parameters and do not change what trained weights compute. The
    plan lists the other patches, each with a reason and, if opt-in, the line to type.

    Args:
        model: A module, wrapped or not, or an object whose `.model` is one (a Trainer).
        verbose: Print on stderr (rank 0) which patches were applied where, and which others are suggested.
        only: As for `hfpatch.plan`.
        include: As for `hfpatch.plan`.
        exclude: As for `hfpatch.plan`.
        added_modules: As for `hfpatch.plan`.
        compute_dtype: As for `hfpatch.plan`.
        options: As for `hfpatch.plan`.
        trust: As for `hfpatch.plan`.
        prove: As for `hfpatch.plan`.
        batch: As for `hfpatch.plan`.
        manifest: A directory in which `applied.save` wrote `hfpatch.json`. What it says is replayed instead of decided:
            on the model of the checkpoint beside it, or on the model as it was before the patches, and on no other. It
            may be combined with `verbose` and `trust` only. An edit that is in force already is left as it is.

    Returns:
        A handle: `.plan`, `.edits`, `.verify(batch)`, `.save(directory)`, `.revert()`; also a context manager.

    Raises:
        InputError: The manifest is missing, damaged, edited, or of a later schema; nothing was changed.
        RefusedError: The manifest is of another model or other code, names a patch that is not registered here, or an
            edit that cannot be made; nothing was changed.
        ApplyError: An edit failed; the edits before it were undone.
        RefusedError: A patch that `only` names by its id is refused; nothing was changed.
        HfpatchError: As for `hfpatch.plan`; nothing was changed.
    """
    want("apply", verbose=(verbose, FLAG), manifest=(manifest, optional(PATH)))
    arguments: dict[str, Any] = {
        "only": only,
        "include": include,
        "exclude": exclude,
        "added_modules": added_modules,
        "compute_dtype": compute_dtype,
        "options": options,
        "prove": prove,
        "batch": batch,
    }
    with one_at_a_time():
        if manifest is not None:
            return _replayed(model, Path(manifest), trust, arguments, verbose=verbose)
        made = plan(model, trust=trust, **arguments)
        return _applied(made, root_module(model), only, verbose=verbose)


def _applied(made: Plan, root: nn.Module, only: Names, *, verbose: bool) -> Applied:
    check_asked(made, only)
    applied = Applied(root, made, carry_out(root, made))
    if verbose:
        say(announcement(applied.plan))
    return applied


def _replayed(model: object, folder: Path, trust: Names, others: Mapping[str, Any], *, verbose: bool) -> Applied:
    if given := [name for name, value in others.items() if value is not None]:
        raise InputError(
            f"apply: manifest= replays what was saved, and {given[0]}= decides anew: leave one of them out"
        )
    from hfpatch.patching.manifest.replaying import replay

    applied, notes = replay(model, folder, names(trust, "trust= takes names of installed packages"))
    if verbose:
        say([*announcement(applied.plan), *(f"hfpatch: {note}" for note in notes)])
    return applied


def check_asked(made: Plan, only: Names) -> None:
    """Raise an error if a patch that `only` names by its id, not by a glob, is refused.

    Raises:
        RefusedError: The patch is refused, with the reason.
    """
    for patch_id in names(only):
        mine = [d for d in made.decisions if d.patch == patch_id]
        if mine and all(d.decided == "refused" for d in mine):
            raise RefusedError(f"{patch_id} was asked for and is refused: {'; '.join(d.reason for d in mine)}")
