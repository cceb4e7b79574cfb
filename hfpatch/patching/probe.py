# frames say whose call is running, and a stand-in is put together part by part
# pyright: reportPrivateUsage=false
"""Finds modules that multiply by 1 + tanh: runs a stand-in for each whose code may, alone, on made-up inputs.

The stand-in shares the parameters and has copies of everything else: the model, its buffers, its hooks and the random
state stay as they are. Parts that are transformers' own are not run, but give back their first tensor.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from hfpatch.errors import RefusedError
from hfpatch.model.survey import Survey, is_stock
from hfpatch.model.tanh import calls_functional_tanh, may_add_one
from hfpatch.patching.functions import Tanh, Watch

ATTEMPTS = 96
FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError, OSError)
"""What somebody's forward may raise on inputs it was not made for; NotImplementedError is a RuntimeError."""

GELU = 0.7978845608, 0.044715
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
DROPPED = ("_hf_hook", "_old_forward", "_compiled_call_impl", "_hfpatch")


@dataclass
class Seen:
    """One place where 1 was added to a tanh."""

    owner: int
    argument: torch.Tensor
    sum: torch.Tensor
    spoiled: str = ""


@dataclass(frozen=True)
class Found:
    """What a probe says of one module.

    Attributes:
        path: Of the module.
        module: The module.
        count: How often it adds 1 to a tanh in one run; 0 where it was not seen to, or could not be run.
        untrained: Every such tanh was exactly 0 for random inputs.
        failure: Why it could not be run; empty where it could.
        spoiled: Why 1 + tanh is no modulation here; empty where it is one.
    """

    path: str
    module: nn.Module
    count: int = 0
    untrained: bool = False
    failure: str = ""
    spoiled: str = ""

    @property
    def functional(self) -> bool:
        """Whether it calls `torch.nn.functional.tanh`."""
        return calls_functional_tanh(self.module)


class Listening(Watch):
    """Notes each 1 + tanh: of which module's call, of which argument, and what it is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[Seen] = []

    def one_plus(self, tanh: Tanh, run: Any) -> Any:
        """Note it."""
        out = run()
        self.sums.append(Seen(_caller(), tanh.argument.detach().clone(), out))
        return out

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As `Watch`; and look at products and quotients of the sums."""
        out = super().__torch_function__(func, types, args, kwargs)
        name = getattr(func, "__name__", "").strip("_").removeprefix("i")
        if name in ("mul", "rmul", "multiply", "div", "truediv", "divide") and len(args) == 2:
            for seen, other in ((s, b) for s in self.sums for a, b in (args, args[::-1]) if s.sum is a):
                seen.spoiled = seen.spoiled or _spoiled(seen.argument, other)
        return out


def _spoiled(argument: torch.Tensor, factor: Any) -> str:
    if isinstance(factor, (int, float)):
        return f"1 + tanh is scaled by {factor:g} there: its middle is not 1"
    if isinstance(factor, torch.Tensor) and factor.shape == argument.shape and not factor.is_meta:
        for u in (factor, 2 * factor):
            gelu = GELU[0] * (u + GELU[1] * u**3)
            if argument.any() and torch.allclose(gelu.float(), argument.float(), rtol=0.05, atol=1e-3):
                return "it is a GELU"
    return ""


def _caller() -> int:
    """Id of the innermost module whose call is running."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and "self" in frame.f_locals:
            return id(frame.f_locals["self"])
        frame = frame.f_back
    return 0


def mentions_tanh(module: nn.Module) -> bool:
    """Whether a module's own code may add 1 to a tanh."""
    return may_add_one(module)


def modulations(survey: Survey, named: tuple[str, ...]) -> Mapping[str, Found]:
    """What a probe finds, by path: of added modules whose code may add 1 to a tanh, and of those that are named.

    Asked once of a survey, which lives as long as one plan.
    """
    kept = _KEPT.setdefault(survey, {})
    if named not in kept:
        places = {path: module for path, module in survey.added.items() if mentions_tanh(module)}
        places.update({path: survey.modules[path] for path in named})
        kept[named] = {found.path: found for found in probe(places.items())}
    return kept[named]


_KEPT: WeakKeyDictionary[Survey, dict[tuple[str, ...], dict[str, Found]]] = WeakKeyDictionary()


def probe(places: Iterable[tuple[str, nn.Module]]) -> list[Found]:
    """Run each module alone and say what was seen. A module seen inside another's run counts as run.

    Args:
        places: Modules with their paths.
    """
    wanted = dict(places)
    results: dict[str, Found] = {}
    by_path: dict[str, list[Seen]] = {}
    zero: dict[str, bool] = {}
    for path, module in wanted.items():
        stand_ins: dict[int, nn.Module] = {}
        copy = stand_in(module, stand_ins)
        sums, failure = _watch(copy, module)
        back = {id(new): old for old, new in stand_ins.items()}
        for other_path, other in wanted.items():
            mine = [s for s in sums if back.get(s.owner) == id(other)]
            if mine:
                by_path[other_path] = mine
                zero[other_path] = all(not s.argument.is_meta and not bool(s.argument.any()) for s in mine)
        results[path] = Found(path, module, failure=failure)
    for path, mine in by_path.items():
        spoiled = next((s.spoiled for s in mine if s.spoiled), "")
        results[path] = Found(path, wanted[path], len(mine), zero[path], spoiled=spoiled)
    return list(results.values())


def _watch(copy: nn.Module, module: nn.Module) -> tuple[list[Seen], str]:
    """The first run that saw anything; else why none ran, empty if one did."""
    first = next((p for p in module.parameters() if p.is_floating_point()), None)
    dtype = torch.get_default_dtype() if first is None else first.dtype
    device = torch.device("cpu") if first is None else first.device
    failure = "its forward takes arguments that cannot be made up"
    ran = False
    forked = [device] if device.type == "cuda" else []
    no_autocast = contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
    with torch.random.fork_rng(devices=forked), torch.no_grad(), no_autocast:
        for attempt, shapes in enumerate(itertools.islice(_inputs(copy, module), ATTEMPTS)):
            listening = Listening()
            inputs = {name: _tensor(name, shape, attempt, dtype, device) for name, shape in shapes.items()}
            try:
                with listening:
                    _call(copy, inputs)
            except RefusedError:
                raise
            except FAILURES as error:
                failure = (
                    failure if ran else f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                )
                continue
            ran = True
            if listening.sums:
                return listening.sums, ""
    return [], "" if ran else failure


def _call(copy: nn.Module, inputs: dict[str, Any]) -> None:
    by_position = [v for k, v in inputs.items() if k.startswith("*")]
    copy(*by_position, **{k: v for k, v in inputs.items() if not k.startswith("*")})


def _tensor(name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if name.endswith("ids"):
        return torch.zeros(shape[:2], dtype=torch.long, device=device)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype=dtype, device=device)


def _inputs(copy: nn.Module, module: nn.Module) -> Iterator[dict[str, tuple[int, ...]]]:
    """Shapes by argument, likely ones first; optional arguments are given in a second round."""
    try:
        signature = inspect.signature(copy.forward)
    except (TypeError, ValueError):
        return
    required, optional = _arguments(signature)
    widths = list(dict.fromkeys([*_widths(module), 8]))
    shapes = [s for w in widths for s in ((1, 2, w), (2, w))]
    if any(isinstance(m, nn.modules.conv._ConvNd) for m in module.modules()):
        shapes += [(1, w, 8, 8) for w in widths] + [(1, w, 8) for w in widths]
    rounds = [required] if not optional else [required, [*required, *optional]]
    for names in rounds:
        if not names:
            yield {}
            continue
        yield from (dict.fromkeys(names, shape) for shape in shapes)
        if len(names) > 1:
            mixed = itertools.product(shapes, repeat=min(len(names), 3))
            yield from (
                dict(zip(names, [*combo, *[combo[-1]] * (len(names) - len(combo))], strict=True))
                for combo in mixed
                if len(set(combo)) > 1
            )


def _arguments(signature: inspect.Signature) -> tuple[list[str], list[str]]:
    """Names of arguments that must be given, and of those that may be tensors: default None."""
    kinds = inspect.Parameter
    required: list[str] = []
    optional: list[str] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind == kinds.VAR_POSITIONAL and not required:
            required.append("*0")
        elif parameter.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY):
            if parameter.default is kinds.empty:
                required.append(name)
            elif parameter.default is None:
                optional.append(name)
    return required, optional


def _widths(module: nn.Module) -> Iterator[int]:
    for part in module.modules():
        for name in ("in_features", "normalized_shape", "num_features", "in_channels", "embedding_dim"):
            size = part.__dict__.get(name)
            size = size[-1] if isinstance(size, tuple) and size else size
            if isinstance(size, int):
                yield size
    for parameter in module.parameters():
        if parameter.ndim:
            yield parameter.shape[-1]


class Through(nn.Module):
    """Stands for a part that is transformers' own: gives back its first tensor."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first tensor among the arguments."""
        return next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)), None)


def stand_in(module: nn.Module, made: dict[int, nn.Module], *, inner: bool = False) -> nn.Module:
    """A module with the same parameters, copied buffers and no hooks, in evaluation mode, parts alike.

    Args:
        module: What it stands for.
        made: Filled: id of each original -> its stand-in.
        inner: It is a part; transformers' own parts are replaced.
    """
    if id(module) in made:
        return made[id(module)]
    if inner and is_stock(type(module)):
        made[id(module)] = Through()
        return made[id(module)]
    new = type(module).__new__(type(module))
    made[id(module)] = new
    own = {k: v for k, v in module.__dict__.items() if k not in DROPPED}
    for name in HOOKS:
        hooks = own.get(name) or {}
        own[name] = OrderedDict((k, h) for k, h in hooks.items() if type(h).__module__.startswith("torch.nn.utils."))
    own["_parameters"] = dict(module._parameters)
    own["_buffers"] = {k: None if b is None else b.detach().clone() for k, b in module._buffers.items()}
    own["_modules"] = {}
    own["training"] = False
    forward = module.__dict__.get("_old_forward", module.__dict__.get("forward"))
    own.pop("forward", None)
    new.__dict__.update(own)
    if isinstance(forward, types.MethodType) and forward.__self__ is module:
        new.__dict__["forward"] = types.MethodType(forward.__func__, new)
    elif forward is not None:
        new.__dict__["forward"] = forward
    for name, child in module._modules.items():
        new._modules[name] = None if child is None else stand_in(child, made, inner=True)
    return new
