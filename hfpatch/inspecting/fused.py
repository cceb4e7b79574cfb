"""Fused projections: one matrix whose output, or input, the code around it takes apart. Told from that code."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from hfpatch.compat.modules import children, parameters
from hfpatch.model.code import is_self, tree_of
from hfpatch.model.survey import Survey
from hfpatch.model.walk import dims, peek, starred

_SPLITS = frozenset(("chunk", "split", "unbind", "tensor_split", "split_with_sizes"))
_FACTS = frozenset(("shape", "dtype", "device", "size", "ndim", "numel", "dim", "stride"))
_PASSING = re.compile(r"norm|act|conv|drop")
_JOINS = frozenset(("cat", "concat", "concatenate", "stack"))


@dataclass(frozen=True)
class Fused:
    """Matrices of one name at one place in every layer, whose output is split into `parts`.

    `path` has list indices replaced by `*`; `parts` are the names the code gives to what it gets, in its order.
    """

    path: str
    cls: str
    parts: tuple[str, ...]
    count: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON: path, class, parts, count."""
        return {"path": self.path, "class": self.cls, "parts": list(self.parts), "count": self.count}


def fused(survey: Survey) -> tuple[Fused, ...]:
    """Every kind of fused projection in an object, in module order. Reads only; source is read once for each class."""
    found: dict[tuple[str, str, tuple[str, ...]], int] = {}
    for path, module in survey.modules.items():
        if type(module).__module__.startswith("torch.") or not (names := _matrices(module)):
            continue
        for name, parts in splits(type(module), names).items():
            inner = children(module).get(name)
            cls = type(module if inner is None else inner).__name__
            key = (starred(f"{path}.{name}" if path else name), cls, parts)
            found[key] = found.get(key, 0) + 1
    return tuple(Fused(*key, count) for key, count in found.items())


def _matrices(module: nn.Module) -> frozenset[str]:
    """Names under which a module holds a matrix: a child that is one linear map, or a parameter of its own.

    What has `weight` itself is a linear map, or a router: what it gives is not taken apart in its own code.
    """
    maps = (name for name, child in children(module).items() if child is not None and _is_map(child))
    return frozenset(
        (*maps, *(n for n, p in parameters(module).items() if p is not None and dims(p) > 1 and n != "weight"))
    )


def _is_map(module: nn.Module) -> bool:
    name = type(module).__name__
    return (
        isinstance(module, nn.Linear) or "Linear" in name or name == "Conv1D" or peek(module, "base_layer") is not None
    )


@cache
def splits(cls: type[nn.Module], names: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """Which of a class's matrices have an output that its code takes apart, and the names of the parts.

    What is put together again at once (the rotary and the plain half of a query) does not count.
    """
    reading = _Reading(cls, names)
    reading.read("forward", {})
    return reading.taken_apart()


class _Reading:
    """Which values in a class's code come from which of its matrices, followed in the order of the source."""

    def __init__(self, cls: type[nn.Module], names: frozenset[str]) -> None:
        self._cls = cls
        self._names = names
        self._whole: dict[str, tuple[str, ...]] = {}
        self._joining = 0
        self._pieces: dict[str, dict[str, str]] = {}
        self._joins: list[set[str]] = []
        self._read: set[tuple[str, frozenset[tuple[str, frozenset[str]]]]] = set()

    def taken_apart(self) -> dict[str, tuple[str, ...]]:
        """Parts by name of the matrix, those that were put together again left out."""
        parts: dict[str, tuple[str, ...]] = {}
        for name, pieces in self._pieces.items():
            numbers = [int(index) for index in pieces if index.isdigit()]
            if len(numbers) == len(pieces) and numbers != list(range(len(numbers))):
                continue  # one of several outputs
            parts[name] = tuple(p for p in pieces.values() if not any(p in j and len(j) > 1 for j in self._joins))
        for name, whole in self._whole.items():
            if not any(join.issuperset(whole) for join in self._joins):
                parts[name] = whole
        return {name: parts[name] for name in sorted(parts) if len(parts[name]) > 1}

    def read(self, function: str, known: dict[str, frozenset[str]]) -> None:
        """Read one method, with what is known of its arguments, and those it calls."""
        key = (function, frozenset(known.items()))
        tree = _tree(self._cls, function)
        if tree is None or key in self._read:
            return
        self._read.add(key)
        values = dict(known)
        for statement in tree.body:
            self._statement(statement, values)

    def _statement(self, node: ast.stmt, values: dict[str, frozenset[str]]) -> None:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            return
        if isinstance(node, ast.Assign):
            self._assign(node.targets[0], node.value, values)
            return
        if isinstance(node, (ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            self._assign(node.target, node.value, values)
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self._statement(child, values)
            elif isinstance(child, ast.expr):
                self._origins(child, values)
            else:
                for inner in ast.iter_child_nodes(child):
                    if isinstance(inner, ast.stmt):
                        self._statement(inner, values)

    def _assign(self, target: ast.expr, value: ast.expr, values: dict[str, frozenset[str]]) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, each in zip(target.elts, value.elts, strict=True):
                self._assign(one, each, values)
            return
        split = self._split(value, values)
        origins = self._origins(value, values, named=target.id if isinstance(target, ast.Name) else None)
        if isinstance(target, ast.Tuple):
            parts = tuple(t.id if isinstance(t, ast.Name) else "?" for t in target.elts)
            if split is not None:
                known = tuple(p for p in parts if p != "_")
                if len(known) > len(self._whole.get(split, ())):  # of several branches, that with most parts
                    self._whole[split] = known
            for part in parts:
                values[part] = frozenset() if split is not None else origins
        elif isinstance(target, ast.Name):
            values[target.id] = origins

    def _split(self, node: ast.expr, values: dict[str, frozenset[str]]) -> str | None:
        """The one matrix whose output an expression takes apart."""
        if isinstance(node, ast.GeneratorExp):
            return self._split(node.generators[0].iter, values)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in _SPLITS:
            return None
        base = node.func.value
        if isinstance(base, ast.Name) and base.id == "torch":
            base = node.args[0] if node.args else base
        origins = self._origins(base, values)
        return next(iter(origins)) if len(origins) == 1 else None

    def _origins(self, node: ast.AST, values: dict[str, frozenset[str]], named: str | None = None) -> frozenset[str]:
        """The matrices that a value comes from. Notes joins, pieces and calls of other methods on the way."""
        if isinstance(node, ast.Name):
            return values.get(node.id, frozenset())
        if isinstance(node, (ast.Compare, ast.Lambda)):
            return frozenset()
        if isinstance(node, ast.Attribute):
            if node.attr in _FACTS:
                return frozenset()
            own = is_self(node.value) and node.attr in self._names
            return frozenset((node.attr,)) if own else self._origins(node.value, values)
        if isinstance(node, ast.Call):
            return self._call(node, values)
        if isinstance(node, ast.Subscript):
            origins = self._origins(node.value, values)
            if len(origins) == 1 and not self._joining and _selects(node.slice):
                self._pieces.setdefault(next(iter(origins)), {}).setdefault(
                    ast.unparse(node.slice), named or ast.unparse(node)
                )
                return frozenset()
            return origins
        return frozenset().union(*(self._origins(child, values) for child in ast.iter_child_nodes(node)))

    def _call(self, node: ast.Call, values: dict[str, frozenset[str]]) -> frozenset[str]:
        joins = isinstance(node.func, ast.Attribute) and node.func.attr in _JOINS
        self._joining += joins
        given = [self._origins(a, values) for a in node.args]
        words = {k.arg: self._origins(k.value, values) for k in node.keywords if k.arg is not None}
        self._joining -= joins
        all_given = frozenset().union(*given, *words.values())
        function = node.func
        if not isinstance(function, ast.Attribute):
            return all_given
        if function.attr in _FACTS:
            return frozenset()
        if joins and node.args and isinstance(node.args[0], (ast.Tuple, ast.List)):
            self._joins.append({e.id for e in node.args[0].elts if isinstance(e, ast.Name)})
        if is_self(function.value):
            if function.attr in self._names:
                return frozenset((function.attr,))
            tree = _tree(self._cls, function.attr)
            if tree is not None:
                known = dict(zip((a.arg for a in tree.args.args[1:]), given, strict=False))
                self.read(function.attr, {k: v for k, v in {**known, **words}.items() if v})
            elif not _PASSING.search(function.attr):  # a module: what it gives is its own
                return frozenset()
            return all_given
        return all_given | self._origins(function.value, values)


def _selects(index: ast.expr) -> bool:
    """Whether an index picks features: a number, or after `...` a number or a slice that ends the index."""
    if isinstance(index, ast.Constant):
        return isinstance(index.value, int)
    if not isinstance(index, ast.Tuple) or not isinstance(dots := index.elts[0], ast.Constant) or dots.value is not ...:
        return False
    last = index.elts[-1]
    if isinstance(last, ast.Slice) and (last.lower or last.upper or last.step):
        return True
    return any(isinstance(e, ast.Constant) and isinstance(e.value, int) for e in index.elts[1:])


@cache
def _tree(cls: type[nn.Module], name: str) -> ast.FunctionDef | None:
    """A method of a class as a tree; None for what is no method, is torch's own, or has no source."""
    function: Any = inspect.getattr_static(cls, name, None)
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not inspect.isfunction(function) or function.__module__.startswith("torch."):
        return None
    tree = tree_of(function)
    return tree if isinstance(tree, ast.FunctionDef) else None
