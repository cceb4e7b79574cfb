"""Code that torch.compile has compiled: it ignores hooks that are added later, and still runs removed ones."""

from __future__ import annotations

from typing import Any

from hfpatch.compat import dynamo
from hfpatch.model.survey import Survey


def compiled_already(survey: Survey) -> str | None:
    """Return why hooks cannot be added or removed now, since torch.compile would not notice; None if they can.

    Looks for code that dynamo holds for the forward functions of this model's classes, so another compiled
    model of the same classes gives the same answer.
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
    """Return a warning if dynamo holds code for a class of this model, which itself is not compiled; else None."""
    if survey.compiled or not dynamo.is_loaded():
        return None
    cls = _code_made({type(m) for m in survey.modules.values()}, certain=True)
    if cls is None:
        return None
    return (
        f"warning: this process has compiled code for {cls.__name__}.forward; if it is this model's "
        "(the wrapper that torch.compile(model) returns is not part of it), call torch._dynamo.reset() first"
    )


def _code_made(classes: set[type], *, certain: bool = False) -> type | None:
    """Return a class for whose forward dynamo holds code; if that is unknown, the first class, or None if `certain`."""
    for cls in classes:
        function: Any = getattr(cls, "forward", None)
        while function is not None:
            code = getattr(function, "__code__", None)
            holds = code is not None and dynamo.holds_code(code)
            if holds or (holds is None and not certain):
                return cls
            function = getattr(function, "__wrapped__", None)
    return None
