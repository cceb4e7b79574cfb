"""Checks the upstream methods that a patch depends on: a changed one is accepted if the patch's repros still pass."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from torch import nn

from hfpatch.compat import accelerate
from hfpatch.model.code import tree_of
from hfpatch.model.wrapping import ON_LAYERS, unwrap
from hfpatch.patching import registry
from hfpatch.patching.context import Context
from hfpatch.patching.language import Needed, Refused, Upstream
from hfpatch.patching.registry import Entry


@cache
def digest(function: Any) -> str:
    """Return twelve hex digits that identify a function's body, without annotations, docstring and decorators.

    Returns `unknown` if the source cannot be read.
    """
    tree = tree_of(function)
    if not isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return "unknown"
    tree.decorator_list = []
    tree.returns = None
    tree.name = "_"
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Drift:
    """Upstream methods that a patch was not tested with.

    Attributes:
        changed: Methods of transformers' own classes, name -> digest. The patch's repros run them.
        foreign: Methods of other code: of a subclass, or set on one module. No repro runs them.
    """

    changed: dict[str, str]
    foreign: tuple[str, ...]


def drift(upstream: Iterable[Upstream], context: Context) -> Drift:
    """Return the methods that the selected modules would run and that the patch was not tested with."""
    changed: dict[str, str] = {}
    foreign: dict[str, None] = {}
    for item in upstream:
        bodies: set[tuple[type, str]] = set()
        for target in item.where.targets(context):
            for module in _inner(target.module):
                if item.method in module.__dict__ and accelerate.HOOK not in module.__dict__:
                    foreign[f"{target.path}.{item.method}, set on this module"] = None
                owner = next(c for c in type(module).__mro__ if item.method in c.__dict__)
                bodies.add((owner, item.method))
        for cls, method in bodies:
            name = f"{cls.__module__}.{cls.__qualname__}.{method}"
            if (found := digest(cls.__dict__[method])) in item.known:
                continue
            if cls.__module__.startswith("transformers."):
                changed[name] = found
            else:
                foreign[name] = None
    return Drift(dict(sorted(changed.items())), tuple(foreign))


def drift_verdict(entry: Entry, context: Context) -> Needed | Refused | None:
    """Return None if every upstream method is known. For changed ones run the patch's repros.

    Returns:
        `Needed` with a warning if the repros pass; `Refused` if one fails, or if a method is foreign.
    """
    found = drift(entry.patch.upstream, context)
    if found.foreign:
        why = f"it was not tested with {found.foreign[0]}, which no repro of this patch runs"
        return Refused(why, "changed-upstream")
    if not found.changed:
        return None
    architecture = context.submodel.architecture if context.submodel else ""
    failure = _repro_fails(entry.id, architecture, tuple(found.changed.items()))
    names = ", ".join(found.changed)
    if failure is None:
        return Needed(f"warning: {names} changed upstream; the patch's repros were run here and pass")
    why = f"{names} changed upstream, and a repro of the patch fails now: {failure}"
    return Refused(why, "changed-upstream")


@lru_cache(maxsize=32)
def _repro_fails(patch_id: str, architecture: str, _bodies: tuple[tuple[str, str], ...]) -> str | None:
    from hfpatch.patching.verifying.proving import try_case

    entry = registry.get(patch_id)
    cases = [c for c in entry.patch.repros if c.architecture == architecture]
    results = (try_case(entry, case, "repro") for case in cases or entry.patch.repros)
    return next((r.text for r in results if not r.passed), None)


def _inner(module: nn.Module) -> list[nn.Module]:
    """Return the modules inside a wrapper (PEFT's around a norm, torch.compile's), else the module itself."""
    module = unwrap(module, ON_LAYERS)
    if not type(module).__module__.startswith("peft."):
        return [module]
    return [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]
