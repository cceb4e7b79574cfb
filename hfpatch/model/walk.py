"""One walk over an object: its modules, the transformers models inside, and the compiled modules."""

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
"""Packages whose modules replace a model's own modules and hold them."""

TOOL_PACKAGES = (*ADAPTERS, "torch.", "transformers.integrations.", "transformers.quantizers.")
"""Packages whose modules replace or wrap stock ones without adding anything to the model's own function."""


SHALLOW, MARGIN = 100, 120
"""Module depth up to which the stack is not checked, and stack frames kept free for the callers of the walk."""


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
        """The submodel's class and path, for a sentence."""
        return f"{type(self.model).__name__} at {self.path!r}" if self.path else type(self.model).__name__


class Walk:
    """The modules of an object, from one walk over it. `Survey` adds the facts that follow from them.

    Args:
        given: A module, wrapped or not, or an object whose `.model` is one (a Trainer, a pipeline).
        added: Paths, globs or modules that the caller declares as added.

    Raises:
        NotAModelError: `given` is neither, or its module is not initialised.
        InputError: The modules are nested deeper than Python's stack allows.
    """

    def __init__(self, given: object, added: Any = None) -> None:
        self.root: nn.Module = root_module(given)
        self.modules: dict[str, nn.Module] = dict(self.root.named_modules())
        self.paths: dict[int, str] = {id(m): p for p, m in self.modules.items()}
        self.named_by_caller = added
        self._known: dict[Any, Any] = {}

    def path(self, module: nn.Module) -> str:
        """Return the path of a module from the root."""
        return self.paths[id(module)]

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """Return `make()`, called once for this walk and cached under `key`."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def below(self, path: str) -> Iterator[tuple[str, nn.Module]]:
        """Yield a module and everything in it, with paths from the root."""
        prefix = f"{path}." if path else ""
        for name, module in self.modules.items():
            if name == path or name.startswith(prefix):
                yield name, module

    def own(self, submodel: Submodel) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of a submodel that lie in no inner submodel, with paths from the root."""
        inner = [s.path for s in self.submodels if s is not submodel and len(s.path) > len(submodel.path)]
        for path, module in self.below(submodel.path):
            if not any(inside(path, other) for other in inner):
                yield path, module

    def holder(self, path: str) -> Submodel | None:
        """Return the innermost submodel that contains a path; None outside all submodels."""
        holders = [s for s in self.submodels if inside(path, s.path)]
        return max(holders, key=lambda s: len(s.path)) if holders else None

    def around(self, path: str) -> tuple[str, PreTrainedModel] | None:
        """Return the innermost transformers model that a module is or lies in, with its path; None if outside all."""
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
                continue  # a hand-written composite: the submodels are inside it
            model_type = getattr(module.config, "model_type", "")
            if not any(inside(path, s.path) and s.architecture == model_type for s in found):
                found.append(Submodel(path, module))
        return tuple(found)

    @cached_property
    def outermost_built(self) -> tuple[Submodel, ...]:
        """Submodels whose class transformers defines or derives from, and that lie in no other such submodel."""
        built = [s for s in self.submodels if stock_class(s.model) is not None]
        return tuple(s for s in built if not any(o is not s and inside(s.path, o.path) for o in built))

    @cached_property
    def compiled(self) -> tuple[str, ...]:
        """Paths of the modules that are compiled, or whose forward is, by the caller or by transformers' `generate`."""
        return tuple(path for path, module in self.modules.items() if dynamo.is_compiled(module))


def root_module(given: object) -> nn.Module:
    """Return the module that the caller passed, or the `.model` of the object.

    Raises:
        NotAModelError: The object holds no module, or the module is not initialised.
        InputError: The modules are nested deeper than Python's stack allows.
    """
    if isinstance(given, nn.Module):
        return _checked(given)
    try:
        inner: Any = getattr(given, "model", None)
    except Exception as error:  # a foreign property may raise anything
        raise NotAModelError(
            f"want a torch module, or an object whose .model is one (a Trainer); {type(given).__name__}.model raises "
            f"{type(error).__name__}: {error}"
        ) from error
    if isinstance(inner, nn.Module):
        return _checked(inner)
    raise NotAModelError(
        f"want a torch module, or an object whose .model is one (a Trainer); got {type(given).__name__}"
    )


def traced(root: nn.Module) -> str:
    """Return why a module takes no patch if it is a program that torch made of a model; empty for any other."""
    if not isinstance(root, torch.fx.GraphModule) and type(root).__module__ != "torch.export.unflatten":
        return ""
    return (
        f"this {type(root).__name__} is a program that torch.export or torch.fx made of a model: it runs what was "
        "traced, with the patches that the model had then. Patch the model, or revert its patches, and export it again"
    )


def check_not_traced(root: nn.Module) -> None:
    """Raise if a module is a program that torch made of a model.

    Raises:
        NotAModelError: It is one, which carries no records.
    """
    if reason := traced(root):
        raise NotAModelError(reason)


def _checked(root: nn.Module) -> nn.Module:
    """Return the module if torch can walk over it: torch does so by recursion."""
    pending, met = [(root, 1)], set[int]()
    while pending:
        module, depth = pending.pop()
        if id(module) in met:
            continue
        met.add(id(module))
        children = module.__dict__.get(CHILDREN)
        if children is None or depth > SHALLOW:
            return _checked_depth(root)
        if children:
            pending.extend([(c, depth + 1) for c in reversed(children.values()) if c is not None])
    return root


def _checked_depth(root: nn.Module) -> nn.Module:
    """The same check for a deep or uninitialised module, with the paths for the error."""
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
            raise NotAModelError(f"{place} is not initialised: call super().__init__() in its __init__")
        named = [(f"{path}.{n}" if path else n, c, depth + 1) for n, c in children.items() if c is not None]
        pending.extend(reversed(named))
    if deepest > SHALLOW and deepest + MARGIN > (room := _frames_left()):
        raise InputError(
            f"{type(root).__name__} nests modules {deepest:,} deep ({where[:24]}...), and Python's stack has room for "
            f"{max(room - MARGIN, 0):,}: torch walks over modules by recursion; call "
            f"sys.setrecursionlimit({sys.getrecursionlimit() + 2 * deepest}) first"
        )
    return root


def _frames_left() -> int:
    """Return the number of frames that Python's stack has left."""
    used, frame = 0, inspect.currentframe()
    while frame is not None:
        used, frame = used + 1, frame.f_back
    return sys.getrecursionlimit() - used


def peek(module: nn.Module, name: str) -> Any:
    """Return an attribute of a module; None if it is missing or raises."""
    try:
        return getattr(module, name, None)
    except Exception:  # noqa: BLE001 - a foreign property or __getattr__ may raise anything
        return None


def dims(tensor: torch.Tensor) -> int:
    """Return a tensor's number of dimensions; 0 for an uninitialised parameter of a lazy module."""
    return 0 if is_lazy(tensor) else tensor.dim()


def elements(tensor: torch.Tensor) -> int:
    """Return a tensor's number of elements; 0 for an uninitialised parameter of a lazy module."""
    return 0 if is_lazy(tensor) else tensor.numel()


def is_stock(cls: type) -> bool:
    """True if transformers, or the remote code of a checkpoint, defines this class."""
    return cls.__module__.startswith(("transformers.", "transformers_modules."))


def stock_class(model: PreTrainedModel) -> type[PreTrainedModel] | None:
    """Return the nearest base class that transformers defines and that has a config class; None if it has none."""
    for cls in type(model).__mro__:
        if cls is PreTrainedModel:
            return None
        if is_stock(cls) and issubclass(cls, PreTrainedModel) and cls.config_class is not None:
            return cls
    return None


def inside(path: str, outer: str) -> bool:
    """True if a path is `outer` or below it; every path is inside the root, whose path is empty."""
    return outer in ("", path) or path.startswith(f"{outer}.")


def outers(path: str) -> Iterator[str]:
    """Yield a path and the paths around it, innermost first; the last is the root's, which is empty."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def starred(path: str) -> str:
    """Return a path with list indices replaced by `*`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)


def without_copy(path: str) -> str:
    """Return a path without PEFT's names for the copies it keeps of one module (`modules_to_save`)."""
    return re.sub(r"\.(original_module|modules_to_save\.[^.]+)(?=\.|$)", "", path)
