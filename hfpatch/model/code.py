"""The source of functions, as a syntax tree; digits that identify one by its bytecode."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Iterable
from types import CodeType, FunctionType
from typing import Any

PLAIN = (bool, int, float, complex, str, bytes)


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


def bytecode_digest(function: FunctionType) -> str:
    """Return twelve hex digits that identify what a function runs: its bytecode, defaults and closed-over values.

    Plain values and functions of its own module that it names count too. The digits are those of this minor release of
    Python; no source is needed.

    Raises:
        ValueError: A default or a closed-over value is neither plain nor a function, so it cannot be told from others.
    """
    return hashlib.sha256("\n".join(_parts(function, set())).encode()).hexdigest()[:12]


def _parts(function: FunctionType, seen: set[int]) -> Iterable[str]:
    if id(function) in seen:
        return
    seen.add(id(function))
    code = function.__code__
    yield from _words(code)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells):
        if isinstance(value, FunctionType):
            yield from _parts(value, seen)
        else:
            yield _word(value)
    named = ((name, function.__globals__.get(name)) for name in code.co_names)
    for name, value in named:
        if isinstance(value, FunctionType) and value.__module__ == function.__module__:
            yield from _parts(value, seen)
        elif isinstance(value, PLAIN):
            yield f"{name} = {_word(value)}"


def _words(code: CodeType) -> Iterable[str]:
    yield code.co_code.hex()
    yield " ".join(code.co_names)
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _words(value)
        else:
            yield _word(value)


def _word(value: Any) -> str:
    if isinstance(value, frozenset):  # their order differs between processes
        items: frozenset[Any] = value
        return f"frozenset {sorted(map(_word, items))}"
    if isinstance(value, tuple):
        parts: tuple[Any, ...] = value
        return f"({', '.join(map(_word, parts))})"
    if value is None or value is ... or isinstance(value, PLAIN):
        return f"{type(value).__name__} {value!r}"
    raise ValueError(f"it holds a value of type {type(value).__name__}")
