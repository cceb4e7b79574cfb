"""Bodies of other packages a patch leans on: known ones pass, a changed one is tried before it is trusted."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Iterable
from typing import Any

from torch import nn

from hfpatch.patching.language import Upstream


def digest(function: Any) -> str:
    """Twelve hex digits that name a function's body: annotations, docstring and decorators do not count.

    `unknown` where the source cannot be read.
    """
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
        tree = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return "unknown"
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


def drifted(upstream: Iterable[Upstream], modules: Iterable[nn.Module]) -> list[str]:
    """Names of the upstream functions that these modules would run and whose bodies are not known ones."""
    classes = {f"{c.__module__}:{c.__qualname__}": c for m in {type(m) for m in modules} for c in m.__mro__}
    changed: list[str] = []
    for item in upstream:
        owner, _, method = item.name.rpartition(".")
        if owner in classes and digest(getattr(classes[owner], method)) not in item.known:
            changed.append(item.name)
    return changed


