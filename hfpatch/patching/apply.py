"""The two verbs: `plan` decides and changes nothing, `apply` carries a plan out, all or nothing."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hfpatch.errors import RefusedError, StalePlanError
from hfpatch.given import FLAG, want
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
    import torch
    from torch import nn


@dataclass(frozen=True)
class Origin:
    """What a plan was made from: the model, which it does not keep alive, and the arguments of `hfpatch.plan`."""

    model: weakref.ref[nn.Module]
    asking: Mapping[str, Any]


@dataclass(frozen=True, repr=False)
class Plan(Decisions):
    """What a set of patches would do to a model. Printing it shows a table, `apply()` carries it out.

    Attributes:
        origin: What it was made from; a copy of a plan, or one that was pickled, has none.
    """

    origin: Origin | None = field(default=None, compare=False)

    def apply(self, *, verbose: bool = True) -> Applied:
        """Do exactly this to the model it was made for, if the model is still as it was then.

        It is made again, and compared with this one. It holds the modules that its edits would change, and only a weak
        reference to the model, so keep the model yourself.

        Args:
            verbose: As for `hfpatch.apply`.

        Returns:
            The handle, as `hfpatch.apply` gives it.

        Raises:
            StalePlanError: The model has changed, or is gone; nothing was changed.
            ApplyError: An edit failed; those before it were undone.
            HfpatchError: As `hfpatch.apply`.
        """
        want("plan.apply", verbose=(verbose, FLAG))
        model = None if self.origin is None else self.origin.model()
        if self.origin is None or model is None:
            why = "is a copy, which knows no model" if self.origin is None else f"is of a {self.model} that is gone"
            raise StalePlanError(f"plan.apply: this plan {why}; make the plan anew: hfpatch.plan(model)")
        with one_at_a_time():
            now = plan(model, **self.origin.asking)
            if (told := difference(self, now)) is not None:
                raise StalePlanError(
                    f"plan.apply: the {self.model} is not as it was when this was planned: {told}; nothing was "
                    "changed; make the plan anew: hfpatch.plan(model)"
                )
            return _applied(now, model, self.origin.asking["only"], verbose=verbose)

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
    asking: dict[str, Any] = {
        "only": only,
        "include": include,
        "exclude": exclude,
        "added_modules": added_modules,
        "compute_dtype": compute_dtype,
        "options": options,
    }
    made = decisions(model, **asking)
    origin = Origin(weakref.ref(root_module(model)), asking)
    return Plan(made.model, made.decisions, made.unknown, made.named, origin)


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
    with one_at_a_time():
        made = plan(
            model,
            only=only,
            include=include,
            exclude=exclude,
            added_modules=added_modules,
            compute_dtype=compute_dtype,
            options=options,
        )
        return _applied(made, root_module(model), only, verbose=verbose)


def _applied(made: Plan, root: nn.Module, only: Names, *, verbose: bool) -> Applied:
    check_asked(made, only)
    applied = Applied(root, made, carry_out(root, made))
    if verbose:
        say(announcement(applied.plan))
    return applied


def check_asked(made: Plan, only: Names) -> None:
    """Raise if a patch that was named by its id is refused; one that only a glob names may be.

    Raises:
        RefusedError: With the reason.
    """
    for patch_id in names(only):
        mine = [d for d in made.decisions if d.patch == patch_id]
        if mine and all(d.decided == "refused" for d in mine):
            raise RefusedError(f"{patch_id} was asked for and is refused: {'; '.join(d.reason for d in mine)}")
