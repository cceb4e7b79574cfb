"""What a proof has to be about, read from a model: the code that its layers run, and the flags that change it."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from types import FunctionType
from typing import Any, TypeGuard

from torch import nn
from transformers import CONFIG_MAPPING

from hfpatch.compat import accelerate
from hfpatch.errors import InputError
from hfpatch.lab.tiny import home, tiny_config
from hfpatch.model.code import tree_of
from hfpatch.model.embed import find_embedding
from hfpatch.model.roles import own_class
from hfpatch.model.source import REJECTIONS
from hfpatch.model.wrapping import ON_LAYERS, unwrap
from hfpatch.patching.context import Context
from hfpatch.patching.proofs.proof import Subject, unreadable
from hfpatch.patching.registry import Entry

LIBRARIES = ("transformers.", "torch.", "contextlib", "functools")
"""Beginnings of the modules whose decorators leave a forward as it is."""


@cache
def digest(function: Any) -> str:
    """Return twelve hex digits that identify a function's body, without annotations, docstring and decorators.

    A function that other code has put around it (`functools.wraps`) counts too. If a source cannot be read, returns a
    word that no other function and no other process has. The cache keeps the function, so its id stays its own.
    """
    around = [w for w in _wrappers(function) if not str(w.__globals__.get("__name__")).startswith(LIBRARIES)]
    found = [_of_body(each) for each in (function, *(w.__code__ for w in around))]
    if "" in found:
        return unreadable(function)
    return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()[:12]


def _wrappers(function: Any) -> Iterator[FunctionType]:
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        if isinstance(function, FunctionType):
            yield function
        function = inner


def _of_body(function: Any) -> str:
    """Return the digits of a body without what is around it; empty if its source cannot be read."""
    tree = tree_of(function)
    return body_digest(tree) if isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)) else ""


def body_digest(tree: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the digits of a function's tree, without annotations, docstring and decorators. The tree is changed."""
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
class Code:
    """The code that a patch depends on in a model.

    Attributes:
        classes: The classes of the modules that it selects, without wrappers.
        stock: Forwards of classes of transformers and torch, name -> digest. The repros run them.
        own: Forwards of other classes, name -> digest. The repros of a stock tiny model do not run them.
        set_here: Forwards that are set on one module. No tiny model has them.
    """

    classes: tuple[type, ...]
    stock: dict[str, str]
    own: dict[str, str]
    set_here: tuple[str, ...]


def code_of(entry: Entry, context: Context) -> Code:
    """Return the forwards that the modules in a patch's `depends_on` would run."""
    stock: dict[str, str] = {}
    own: dict[str, str] = {}
    set_here: dict[str, None] = {}
    classes: dict[type, None] = {}
    for where in entry.patch.depends_on:
        for target in where.targets(context):
            for module in _inner(target.module):
                if _is_other(module.__dict__.get("forward"), module) and accelerate.HOOK not in module.__dict__:
                    set_here[f"{target.path}.forward, set on this module"] = None
                classes[own_class(module)] = None
    for cls in classes:
        owner = next(c for c in cls.__mro__ if "forward" in c.__dict__)
        theirs = owner.__module__.startswith(("transformers.", "torch.nn."))
        name = f"{owner.__module__}.{owner.__qualname__}.forward"
        (stock if theirs else own)[name] = digest(owner.__dict__["forward"])
    return Code(tuple(classes), dict(sorted(stock.items())), dict(sorted(own.items())), tuple(set_here))


def _is_other(forward: Any, module: nn.Module) -> bool:
    """True if a forward that is set on a module runs something else than the class's: `kernelize` sets that too."""
    own = getattr(forward, "__func__", None) is type(module).forward and getattr(forward, "__self__", None) is module
    return forward is not None and not own


def subject(entry: Entry, context: Context, code: Code) -> Subject:
    """Return what a proof has to be about to count for a submodel; of a user's class, with its name as a flag."""
    assert context.submodel is not None  # noqa: S101 - its layers were selected
    flags = structural(context.submodel.model.config, code.classes)
    if code.own or not of_transformers(context.submodel.architecture):
        cls = type(context.submodel.model)
        flags["class"] = f"{cls.__module__}.{cls.__qualname__}"
    return Subject(
        entry.digest,
        context.submodel.architecture,
        json.dumps(flags, sort_keys=True),
        frozenset([*code.stock.values(), *code.own.values()]),
        release("torch"),
        release("transformers"),
    )


def with_model_flags(about: Subject, context: Context, code: Code) -> Subject:
    """Return the subject of a tower with the flags that its model reads too: Wav2Vec 2.0's choose the layers' class."""
    submodel = context.submodel
    if submodel is None or find_embedding(submodel.model) is not None:
        return about
    flags = structural(submodel.model.config, (*code.classes, type(submodel.model)))
    return replace(about, flags=json.dumps(about.settings | flags, sort_keys=True))


def of_transformers(architecture: str) -> bool:
    """True if transformers itself has this `model_type`; False for one that `AutoConfig.register` added."""
    return architecture in CONFIG_MAPPING and CONFIG_MAPPING[architecture].__module__.startswith("transformers.")


@cache
def release(package: str) -> str:
    """Return the version of an installed package, without what follows a `+`."""
    return metadata.version(package).partition("+")[0]


def structural(config: Any, classes: tuple[type, ...]) -> dict[str, Any]:
    """Return the values that these classes read of a config and that may change what they build.

    Those that are as in the tiny config of the architecture are left out: a proof without flags is about that. A number
    counts only if it is 0 or None where the tiny config's is not, or the other way round; a list by its strings.
    """
    tiny = tiny_part(config.model_type)
    if tiny is None:
        return {}
    changed: dict[str, Any] = {}
    for name in sorted(set().union(*map(_read_names, classes))):
        value, usual = _value(config, name), _value(tiny, name)
        if name.startswith("_") or value is ... or usual is ...:
            continue
        if _kind(value) != _kind(usual) and (plain := _plain(value)) is not ...:
            changed[name] = plain
    return changed


def _value(config: Any, name: str) -> Any:
    """Return a value of a config; `...` if it has none, and a word for one that differs by layer, which raises."""
    try:
        return getattr(config, name, ...)
    except RuntimeError:
        return "by layer"


@cache
def tiny_part(architecture: str) -> Any:
    """Return the tiny config of an architecture, inside another's if it has no model of its own; None if none."""
    try:
        return next((c for c in _parts(tiny_config(home(architecture))) if c.model_type == architecture), None)
    except (InputError, *REJECTIONS):
        return None


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            yield from _parts(part)


@cache
def _read_names(cls: type) -> frozenset[str]:
    """Return the names that a class's source reads from a config: `config.name`, `getattr(config, "name", ...)`."""
    names: set[str] = set()
    for base in cls.__mro__:
        tree = tree_of(base) if base.__module__.startswith("transformers.models.") else None
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Attribute) and _is_config(node.value):
                names.add(node.attr)
            elif isinstance(node, ast.Call) and len(node.args) > 1 and _is_config(node.args[0]):
                names |= {word.value for word in node.args[1:2] if _is_text(word)}
    return frozenset(names)


def _is_text(node: ast.expr) -> TypeGuard[Any]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_config(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id == "config") or (
        isinstance(node, ast.Attribute) and node.attr == "config"
    )


def _kind(value: Any) -> Any:
    """Return what matters of a config's value for structure."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return value == 0, "number"
    if isinstance(value, (list, tuple)):
        items: list[Any] = list(value)  # pyright: ignore[reportUnknownArgumentType]
        return frozenset(map(str, items)) if all(isinstance(i, str) for i in items) else (not items, "list")
    return type(value).__name__


def _plain(value: Any) -> Any:
    """Return a value as JSON holds it, a list as its distinct strings; `...` if JSON does not hold it."""
    if value is None or isinstance(value, (bool, str, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        items: list[Any] = list(value)  # pyright: ignore[reportUnknownArgumentType]
        if all(isinstance(i, str) for i in items):
            return list(dict.fromkeys(items))
    return ...


def _inner(module: nn.Module) -> list[nn.Module]:
    """Return the modules inside a wrapper (PEFT's around a norm, torch.compile's), else the module itself."""
    module = unwrap(module, ON_LAYERS)
    if not type(module).__module__.startswith("peft."):
        return [module]
    return [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]
