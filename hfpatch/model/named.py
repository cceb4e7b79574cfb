"""Modules and submodels that an option names: by path, by glob, or as modules."""

from __future__ import annotations

import fnmatch
from typing import Any

from torch import nn

from hfpatch.errors import InputError
from hfpatch.model.survey import Survey


def paths(survey: Survey, wanted: Any, option: str) -> tuple[str, ...]:
    """Return the paths of the modules that an option names, in its order, without duplicates.

    Args:
        survey: Survey of the model.
        wanted: A path, glob or module, or a list of them.
        option: The option's name for errors, e.g. `projection-init: modules`.

    Raises:
        InputError: `wanted` is none of these, a name matches no path, or a module is not part of this model.
    """
    items: Any = [wanted] if isinstance(wanted, (str, nn.Module)) else wanted
    if not isinstance(items, (list, tuple, set, frozenset)):
        raise InputError(f"options: {option}: want paths, globs or modules, got {type(wanted).__name__} {wanted!r}")
    out: list[str] = []
    for item in items:
        if isinstance(item, nn.Module):
            if id(item) not in survey.paths:
                raise InputError(f"options: {option}: a {type(item).__name__} that is not part of this model")
            out.append(survey.path(item))
            continue
        if not isinstance(item, str):
            raise InputError(f"options: {option}: want paths, globs or modules, got {type(item).__name__} {item!r}")
        hits = [p for p in survey.modules if fnmatch.fnmatchcase(p, item)]
        if not hits:
            raise InputError(f"options: {option}: no module's path matches {item!r}")
        out += hits
    return tuple(dict.fromkeys(out))


def check_submodel(survey: Survey, wanted: Any, option: str) -> None:
    """Check that an option is None or names exactly one submodel, by path or architecture.

    Raises:
        InputError: It names none, or several.
    """
    have = [(s.path, s.architecture) for s in survey.submodels]
    hits = sum(wanted in place for place in have)
    if wanted is not None and hits != 1:
        what = "several submodels are" if hits else "no submodel"
        listed = ", ".join(f"{path!r} ({architecture})" for path, architecture in have)
        raise InputError(f"options: {option}: {what} {wanted!r}; there are {listed}: give a path")
