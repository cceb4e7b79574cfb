"""What stands between a decision and its edits: a compiled model that would not notice, upstream bodies that moved."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

from torch import nn

from hfpatch.model.survey import Survey
from hfpatch.patching import registry
from hfpatch.patching.drift import digest, drifted
from hfpatch.patching.language import Needed, Refused
from hfpatch.patching.registry import Entry


def compiled_already(survey: Survey) -> str | None:
    """Why hooks cannot be added or removed now: torch.compile keeps running the code it made. None if they can.

    Looks for code that dynamo holds for the forward functions of this model's classes; another compiled
    model of the same classes reads the same.
    """
    if not survey.compiled:
        return None
    import torch._dynamo.eval_frame as eval_frame

    entries: Any = getattr(eval_frame, "_debug_get_cache_entry_list", None)
    for cls in {type(m) for path in survey.compiled for _, m in survey.below(path)}:
        function: Any = cls.forward
        while function is not None:
            code = getattr(function, "__code__", None)
            if code is not None and (entries is None or entries(code)):
                where = survey.compiled[0] or "the model"
                return (
                    f"{where!r} is compiled and was called: torch.compile would go on running the code it made "
                    f"without the hooks (found for {cls.__name__}.forward); call torch._dynamo.reset() first"
                )
            function = getattr(function, "__wrapped__", None)
    return None


def drift_verdict(entry: Entry, architecture: str, modules: list[nn.Module]) -> Needed | Refused | None:
    """None where every upstream body is a known one; else what the patch's own repro says of the changed ones."""
    changed = drifted(entry.patch.upstream, modules)
    if not changed:
        return None
    functions = tuple(sorted(changed))
    healed = _still_cures(entry.id, architecture, tuple(_digest_of(name) for name in functions))
    names = ", ".join(n.partition(":")[2] for n in functions)
    if healed is None:
        return Needed(f"warning: {names} changed upstream; the patch's repro was run here and is cured")
    return Refused(f"{names} changed upstream and the patch's repro is not cured any more: {healed}")


@lru_cache(maxsize=32)
def _still_cures(patch_id: str, architecture: str, _digests: tuple[str, ...]) -> str | None:
    from hfpatch.patching.verify import try_repro

    entry = registry.get(patch_id)
    cases = [c for c in entry.patch.repros if c.architecture == architecture]
    for case in cases or entry.patch.repros:
        result = try_repro(entry, case)
        if not result.passed:
            return result.text
    return None


def _digest_of(name: str) -> str:
    module_name, _, qualified = name.partition(":")
    import importlib

    found: Any = importlib.import_module(module_name)
    for part in qualified.split("."):
        found = getattr(found, part)
    return digest(inspect.unwrap(found))
