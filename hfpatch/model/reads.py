"""Which parts of a layer read the residual stream itself, and which read the output of a norm, from the layer's code.

The first argument of a forward is the stream, and so is every sum with it. A norm or a part that is called on it reads
the stream. A part that begins with a norm of its own is opened: its parts are read in turn.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from torch import nn

from hfpatch.model.code import is_self, tree_of
from hfpatch.model.norms import acts_as_norm
from hfpatch.model.wrapping import ON_LAYERS, unwrap

Kind = Literal["stream", "norm", "branch"]
"""What a value is: the stream, the output of a norm, or anything else."""

CASTS = ("to", "type", "type_as", "half", "bfloat16")
"""Methods that change the dtype of a tensor."""

_CERTAIN: dict[Kind, int] = {"norm": 0, "branch": 1, "stream": 2}
"""Of two ways to make a value, the one with the lower number counts: a part reads the stream only if it always does."""


@dataclass(frozen=True)
class Part:
    """A child of a layer, or an item of a list that is a child: its name and the module."""

    name: str
    module: nn.Module

    @property
    def called(self) -> str:
        """The name by which the forward of the layer calls it: that of the list for an item of one."""
        return self.name.partition(".")[0]


def parts(layer: nn.Module) -> Iterator[Part]:
    """Yield the children of a layer, with the items of its lists in place of the lists."""
    for name, child in layer.named_children():
        if isinstance(child, nn.ModuleList):
            yield from (Part(f"{name}.{key}", item) for key, item in child.named_children())
        else:
            yield Part(name, child)


@dataclass(frozen=True)
class Reading:
    """How a module's forward reads its first argument, the stream; all empty if the source cannot be read.

    Attributes:
        stream: Names of the children, norms too, that it calls on the stream.
        methods: Names of the children of which it calls a method: hooks on these do not run.
        casts: True if it casts the stream.
    """

    stream: frozenset[str] = frozenset()
    methods: frozenset[str] = frozenset()
    casts: bool = False


def reading_of(layer: nn.Module) -> Reading:
    """Return how a module's forward reads the stream."""
    layer = unwrap(layer, ON_LAYERS)
    children = list(parts(layer))
    norms = frozenset(p.called for p in children if acts_as_norm(p.module))
    plain = frozenset(p.called for p in children if next(p.module.parameters(), None) is None) - norms
    return _reads(type(layer), norms, plain)


def begins_with_norm(module: nn.Module) -> bool:
    """True if a norm of its own is all that reads the first argument of a module's forward."""
    module = unwrap(module, ON_LAYERS)
    reading = reading_of(module)
    found = [
        p
        for p in parts(module)
        if p.called in reading.stream | reading.methods and next(p.module.parameters(), None) is not None
    ]
    return bool(found) and all(acts_as_norm(p.module) for p in found)


@cache
def calls(cls: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of the children that a class's forward calls, in the order of its source."""
    return _named(sorted(_made(cls), key=lambda call: (call.lineno, call.col_offset)))


@cache
def calls_as_they_end(cls: type[nn.Module]) -> tuple[str, ...]:
    """Return them in the order in which the calls end: those in the arguments of another end before it."""
    return _named(sorted(_made(cls), key=lambda call: (call.end_lineno or 0, call.end_col_offset or 0)))


def _made(cls: type[nn.Module]) -> list[ast.Call]:
    tree = tree_of(cls.forward)
    return [] if tree is None else [n for n in ast.walk(tree) if isinstance(n, ast.Call)]


def _named(made: list[ast.Call]) -> tuple[str, ...]:
    return tuple(name for call in made if (name := _child(call.func)) is not None)


@cache
def _reads(cls: type[nn.Module], norms: frozenset[str], plain: frozenset[str]) -> Reading:
    tree = tree_of(cls.forward)
    if not isinstance(tree, ast.FunctionDef) or len(tree.args.args) < 2:
        return Reading()
    code = _Code(norms, plain)
    code.follow(tree.body, {tree.args.args[1].arg: "stream"})
    return Reading(frozenset(code.found), frozenset(code.methods), code.casts)


class _Code:
    """Follows the values of one forward.

    Args:
        norms: Names of the children that are norms.
        plain: Names of the children without weights: dropout, activations.
    """

    def __init__(self, norms: frozenset[str], plain: frozenset[str]) -> None:
        self.norms, self.plain = norms, plain
        self.found: set[str] = set()
        self.methods: set[str] = set()
        self.casts = False

    def follow(self, statements: Iterable[ast.stmt], values: dict[str, Kind]) -> dict[str, Kind]:
        """Note the children that read the stream; return the values of the variables afterwards."""
        for statement in statements:
            if isinstance(statement, ast.If):
                self.kind(statement.test, values)
                values = _either(*(self.follow(way, dict(values)) for way in (statement.body, statement.orelse)))
            elif isinstance(statement, ast.Assign):
                kind = self.kind(statement.value, values)
                names = {n.id for t in statement.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
                values = {**values, **dict.fromkeys(names, kind)}
            elif isinstance(statement, ast.AugAssign):
                kind = self.kind(statement.value, values)
                if isinstance(statement.target, ast.Name) and "stream" in (kind, values.get(statement.target.id)):
                    values = {**values, statement.target.id: "stream"}
            elif isinstance(statement, (ast.Expr, ast.Return)) and statement.value is not None:
                self.kind(statement.value, values)
            else:
                values = self.follow(getattr(statement, "body", ()), values)
        return values

    def kind(self, value: ast.expr, values: dict[str, Kind]) -> Kind:
        """Return what an expression is, and note the calls in it."""
        match value:
            case ast.Name():
                return values.get(value.id, "branch")
            case ast.BinOp(op=ast.Add() | ast.Sub()):
                both: list[Kind] = [self.kind(side, values) for side in (value.left, value.right)]
                return "stream" if "stream" in both else "branch"
            case ast.BinOp(op=ast.Mult() | ast.Div()):
                sides: list[Kind] = [
                    self.kind(s, values) for s in (value.left, value.right) if not isinstance(s, ast.Constant)
                ]
                return sides[0] if len(sides) == 1 else "stream" if "stream" in sides else "branch"
            case ast.IfExp():
                ways: list[Kind] = [self.kind(way, values) for way in (value.body, value.orelse)]
                return min(ways, key=_CERTAIN.__getitem__)
            case ast.Subscript():
                return self.kind(value.value, values)
            case ast.Call():
                return self._called(value, values)
            case _:
                for inner in ast.iter_child_nodes(value):
                    if isinstance(inner, ast.expr):
                        self.kind(inner, values)
                return "branch"

    def _called(self, call: ast.Call, values: dict[str, Kind]) -> Kind:
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        kinds: list[Kind] = [self.kind(each, values) for each in given]
        child = _child(call.func)
        if child is None:
            if not isinstance(call.func, ast.Attribute):
                return "branch"
            if (part := _child(call.func.value)) is not None:
                self.methods.add(part)
                return "stream" if "stream" in kinds else "branch"
            kind: Kind = self.kind(call.func.value, values)  # a view of it
            self.casts |= kind == "stream" and call.func.attr in CASTS
            return kind
        first: Kind = kinds[0] if kinds else "branch"
        named = [k for k, keyword in zip(kinds[len(call.args) :], call.keywords, strict=True) if keyword.arg]
        if not call.args and "stream" in named:
            first = "stream"
        if child in self.plain:
            return first
        if first == "stream":
            self.found.add(child)
        return "norm" if child in self.norms else "branch"


def _child(called: ast.expr) -> str | None:
    """Return the name of the child that `self.name` or `self.name[0]` is; None for another expression."""
    if isinstance(called, ast.Subscript):
        called = called.value
    return called.attr if isinstance(called, ast.Attribute) and is_self(called.value) else None


def _either(one: dict[str, Kind], other: dict[str, Kind]) -> dict[str, Kind]:
    def both(name: str) -> Kind:
        ways: list[Kind] = [one.get(name, "branch"), other.get(name, "branch")]
        return min(ways, key=_CERTAIN.__getitem__)

    return {name: both(name) for name in {**one, **other}}
