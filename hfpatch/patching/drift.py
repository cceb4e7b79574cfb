"""Bodies of other packages a patch leans on: known ones pass, a changed one is tried before it is trusted."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Iterable
from functools import cache
from typing import Any

from hfpatch.patching.context import Context
from hfpatch.patching.language import Upstream


@cache
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


def drifted(upstream: Iterable[Upstream], context: Context) -> dict[str, str]:
    """Methods these modules would run whose bodies are not known ones: qualified name -> digest."""
    changed: dict[str, str] = {}
    for item in upstream:
        for cls in {type(t.module) for t in item.where.targets(context)}:
            method: Any = getattr(cls, item.method)
            if (found := digest(method)) not in item.known:
                changed[f"{cls.__module__}.{cls.__qualname__}.{item.method}"] = found
    return dict(sorted(changed.items()))
