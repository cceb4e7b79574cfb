"""The source of functions, as a tree."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any


def tree_of(function: Any) -> ast.stmt | None:
    """The definition of a function, made anew at each call; None where its source cannot be read."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    except (OSError, TypeError, SyntaxError):
        return None
    return next(iter(body), None)


def is_self(node: ast.AST) -> bool:
    """Whether a node is the name `self`."""
    return isinstance(node, ast.Name) and node.id == "self"
