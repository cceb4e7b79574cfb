"""One walk over an object: its modules, the transformers models inside, and what is wrapped around them."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from transformers import PreTrainedModel

from hfpatch.compat import dynamo
from hfpatch.compat.modules import CHILDREN
from hfpatch.errors import InputError, NotAModelError
from hfpatch.given import Kind

T = TypeVar("T")

ADAPTERS = ("peft.", "accelerate.", "bitsandbytes.")
"""Packages whose modules stand in the place of a model's own ones and hold them."""

TOOL_PACKAGES = (*ADAPTERS, "torch.", "transformers.integrations.", "transformers.quantizers.")
"""Packages whose modules replace or wrap stock ones without adding anything to the model's own function."""


SHALLOW, MARGIN = 100, 120
"""Levels of modules within which nobody has to count, and calls that are kept free for what walks over them."""


MODEL = Kind("a transformers model", lambda v: isinstance(v, PreTrainedModel))


@dataclass(frozen=True)
class Submodel:
    """A `PreTrainedModel` of one architecture, the outermost of that architecture.

    `LlamaForCausalLM` and the `LlamaModel` in it are one submodel; a vision-language model holds several.
    """

    path: str
    model: PreTrainedModel

    @property
    def architecture(self) -> str:
        """`config.model_type`."""
        return str(self.model.config.model_type)

    @property
    def place(self) -> str:
        """How to name it in a sentence."""
        return f"{type(self.model).__name__} at {self.path!r}" if self.path else type(self.model).__name__


class Walk:
    """What an object holds, by one walk over its modules. `Survey` adds the facts that follow from it.

    Args:
        given: A module, however wrapped, or an object whose `.model` is one (a Trainer, a pipeline).
        added: Paths, or modules themselves, that the caller says were added.

    Raises:
        NotAModelError: Neither.
    """

    def __init__(self, given: object, added: Any = None) -> None:
        self.root: nn.Module = root_module(given)
        self.modules: dict[str, nn.Module] = dict(self.root.named_modules())
        self.paths: dict[int, str] = {id(m): p for p, m in self.modules.items()}
        self.named_by_caller = added
        self._known: dict[Any, Any] = {}

    def path(self, module: nn.Module) -> str:
        """Path of a module from the root."""
        return self.paths[id(module)]

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` gives, made once for this walk: a plan asks for it several times."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def below(self, path: str) -> Iterator[tuple[str, nn.Module]]:
        """A module and everything in it, with paths from the root."""
        prefix = f"{path}." if path else ""
        for name, module in self.modules.items():
            if name == path or name.startswith(prefix):
                yield name, module

    def own(self, submodel: Submodel) -> Iterator[tuple[str, nn.Module]]:
        """What of a submodel lies in no other submodel, with paths from the root."""
        inner = [s.path for s in self.submodels if s is not submodel and len(s.path) > len(submodel.path)]
        for path, module in self.below(submodel.path):
            if not any(inside(path, other) for other in inner):
                yield path, module

    def holder(self, path: str) -> Submodel | None:
        """The innermost submodel a module lies in; None outside all of them."""
        holders = [s for s in self.submodels if inside(path, s.path)]
        return max(holders, key=lambda s: len(s.path)) if holders else None

    def around(self, path: str) -> tuple[str, PreTrainedModel] | None:
        """The innermost transformers model, submodel or part of one, that a module is or lies in, with its path."""
        while not isinstance(model := self.modules[path], PreTrainedModel):
            if not path:
                return None
            path = path.rpartition(".")[0]
        return path, model

    @cached_property
    def submodels(self) -> tuple[Submodel, ...]:
        """The transformers models inside, outermost first."""
        found: list[Submodel] = []
        for path, module in self.modules.items():
            if not isinstance(module, PreTrainedModel) or not hasattr(module, "config"):
                continue
            if stock_class(module) is None and any(
                isinstance(m, PreTrainedModel) for m in module.modules() if m is not module
            ):
                continue  # somebody's own composite: what it holds are the submodels
            model_type = getattr(module.config, "model_type", "")
            if not any(inside(path, s.path) and s.architecture == model_type for s in found):
                found.append(Submodel(path, module))
        return tuple(found)

    @cached_property
    def outermost_built(self) -> tuple[Submodel, ...]:
        """Submodels with a class of transformers behind them that lie in no other such submodel."""
        built = [s for s in self.submodels if stock_class(s.model) is not None]
        return tuple(s for s in built if not any(o is not s and inside(s.path, o.path) for o in built))

    @cached_property
    def compiled(self) -> tuple[str, ...]:
        """Paths of modules that were compiled, whole or their forward, by the caller or by transformers' `generate`."""
        return tuple(path for path, module in self.modules.items() if dynamo.is_compiled(module))


def root_module(given: object) -> nn.Module:
    """The module in what the caller passed.

    Raises:
        NotAModelError: There is none, or it is not made yet.
        InputError: It is deeper than Python's stack.
    """
    if isinstance(given, nn.Module):
        return _walkable(given)
    try:
        inner: Any = getattr(given, "model", None)
    except Exception as error:  # somebody else's property, and it may raise anything
        raise NotAModelError(
            f"want a torch module, or an object whose .model is one (a Trainer); {type(given).__name__}.model raises "
            f"{type(error).__name__}: {error}"
        ) from error
    if isinstance(inner, nn.Module):
        return _walkable(inner)
    raise NotAModelError(
        f"want a torch module, or an object whose .model is one (a Trainer); got {type(given).__name__}"
    )


def _walkable(root: nn.Module) -> nn.Module:
    """The module itself, if torch can walk over what it holds, which it does by recursion."""
    pending, met = [(root, 1)], set[int]()
    while pending:
        module, depth = pending.pop()
        if id(module) in met:
            continue
        met.add(id(module))
        children = module.__dict__.get(CHILDREN)
        if children is None or depth > SHALLOW:
            return _walked(root)
        if children:
            pending.extend([(c, depth + 1) for c in reversed(children.values()) if c is not None])
    return root


def _walked(root: nn.Module) -> nn.Module:
    """The same, of a deep module or one that is not made yet, with the paths that an error names."""
    deepest, where = 0, ""
    pending, met = [("", root, 1)], set[int]()
    while pending:
        path, module, depth = pending.pop()
        if id(module) in met:
            continue
        met.add(id(module))
        if depth > deepest:
            deepest, where = depth, path
        children = module.__dict__.get(CHILDREN)
        if children is None:
            place = f"{type(module).__name__}{f' at {path!r}' if path else ''}"
            raise NotAModelError(f"{place} is no module yet: its __init__ did not call super().__init__()")
        named = [(f"{path}.{n}" if path else n, c, depth + 1) for n, c in children.items() if c is not None]
        pending.extend(reversed(named))
    if deepest > SHALLOW and deepest + MARGIN > (room := _room()):
        raise InputError(
            f"{type(root).__name__} holds modules {deepest:,} deep ({where[:24]}...), and Python's stack has room for "
            f"{max(room - MARGIN, 0):,} here: torch walks over modules by recursion; "
            f"sys.setrecursionlimit({sys.getrecursionlimit() + 2 * deepest}) makes room"
        )
    return root


def _room() -> int:
    """Calls that Python's stack can still take."""
    used, frame = 0, inspect.currentframe()
    while frame is not None:
        used, frame = used + 1, frame.f_back
    return sys.getrecursionlimit() - used


def peek(module: nn.Module, name: str) -> Any:
    """An attribute of a module; None where there is none, or where asking for it raises."""
    try:
        return getattr(module, name, None)
    except Exception:  # noqa: BLE001 - somebody else's property or __getattr__, and it may raise anything
        return None


def dims(tensor: torch.Tensor) -> int:
    """How many dimensions a tensor has; 0 where a lazy module has not made it yet."""
    return 0 if is_lazy(tensor) else tensor.dim()


def elements(tensor: torch.Tensor) -> int:
    """How many values a tensor holds; 0 where a lazy module has not made it yet."""
    return 0 if is_lazy(tensor) else tensor.numel()


def is_stock(cls: type) -> bool:
    """Whether transformers (or code a checkpoint brought along) defines this class itself."""
    return cls.__module__.startswith(("transformers.", "transformers_modules."))


def stock_class(model: PreTrainedModel) -> type[PreTrainedModel] | None:
    """The nearest class of a model that transformers defines and that can be built; None for a bare base class."""
    for cls in type(model).__mro__:
        if cls is PreTrainedModel:
            return None
        if is_stock(cls) and issubclass(cls, PreTrainedModel) and cls.config_class is not None:
            return cls
    return None


def inside(path: str, outer: str) -> bool:
    """Whether a path is `outer` or below it; every path is inside the root, whose path is empty."""
    return outer in ("", path) or path.startswith(f"{outer}.")


def starred(path: str) -> str:
    """A path with list indices replaced by `*`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)


def without_copy(path: str) -> str:
    """A path without PEFT's names for the copies it keeps of one module (`modules_to_save`)."""
    return re.sub(r"\.(original_module|modules_to_save\.[^.]+)(?=\.|$)", "", path)
