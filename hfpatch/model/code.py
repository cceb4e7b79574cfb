"""The source of functions, as a syntax tree."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any


def tree_of(function: Any) -> ast.stmt | None:
    """Parse and return the definition of a function; None if its source cannot be read."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    except (OSError, TypeError, SyntaxError):
        return None
    return next(iter(body), None)


def is_self(node: ast.AST) -> bool:
    """True if a node is the name `self`."""
    return isinstance(node, ast.Name) and node.id == "self"
