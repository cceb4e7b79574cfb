"""What stands between a decision and its edits: a compiled model that would not notice, upstream bodies that moved."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from hfpatch.compat import dynamo
from hfpatch.model.survey import Survey
from hfpatch.patching import registry
from hfpatch.patching.context import Context
from hfpatch.patching.drift import drift
from hfpatch.patching.language import Needed, Refused
from hfpatch.patching.registry import Entry


def compiled_already(survey: Survey) -> str | None:
    """Why hooks cannot be added or removed now: torch.compile keeps running the code it made. None if they can.

    Looks for code that dynamo holds for the forward functions of this model's classes; another compiled
    model of the same classes reads the same.
    """
    if not survey.compiled:
        return None
    cls = _code_made({type(m) for path in survey.compiled for _, m in survey.below(path)})
    if cls is None:
        return None
    return (
        f"{survey.compiled[0] or 'the model'!r} is compiled and was called: torch.compile would go on running the code "
        f"it made without the hooks (found for {cls.__name__}.forward); call torch._dynamo.reset() first"
    )


def compiled_elsewhere(survey: Survey) -> str | None:
    """A warning where torch.compile holds code for a class of this model, though the model itself is not compiled."""
    if survey.compiled or not dynamo.is_loaded():
        return None
    cls = _code_made({type(m) for m in survey.modules.values()}, certain=True)
    if cls is None:
        return None
    return (
        f"warning: this process has compiled code for {cls.__name__}.forward; if it was made of this model "
        "(torch.compile(model) keeps a wrapper that is not part of it), call torch._dynamo.reset() first"
    )


def _code_made(classes: set[type], *, certain: bool = False) -> type | None:
    """A class for whose forward dynamo holds code; where that cannot be asked, the first unless it must be certain."""
    for cls in classes:
        function: Any = getattr(cls, "forward", None)
        while function is not None:
            code = getattr(function, "__code__", None)
            holds = code is not None and dynamo.holds_code(code)
            if holds or (holds is None and not certain):
                return cls
            function = getattr(function, "__wrapped__", None)
    return None


def drift_verdict(entry: Entry, context: Context) -> Needed | Refused | None:
    """None where every upstream body is a known one; else what the patch's own repro says of the changed ones."""
    found = drift(entry.patch.upstream, context)
    if found.foreign:
        return Refused(
            f"it was not proved with {found.foreign[0]}, which no repro of this patch runs", "changed-upstream"
        )
    if not found.changed:
        return None
    architecture = context.submodel.architecture if context.submodel else ""
    failure = _repro_fails(entry.id, architecture, tuple(found.changed.items()))
    names = ", ".join(found.changed)
    if failure is None:
        return Needed(f"warning: {names} changed upstream; the patch's repro was run here and is cured")
    why = f"{names} changed upstream, and the patch's repro is not cured any more: {failure}"
    return Refused(why, "changed-upstream")


@lru_cache(maxsize=32)
def _repro_fails(patch_id: str, architecture: str, _bodies: tuple[tuple[str, str], ...]) -> str | None:
    from hfpatch.patching.verifying.verify import try_case

    entry = registry.get(patch_id)
    cases = [c for c in entry.patch.repros if c.architecture == architecture]
    results = (try_case(entry, case, "repro") for case in cases or entry.patch.repros)
    return next((r.text for r in results if not r.passed), None)
