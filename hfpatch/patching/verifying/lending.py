"""A model run as if it were another: its weights and buffers in another dtype, lent while they are used.

The parameters stay the same objects, and so does all else: what a run changes is put back when it ends, whatever ends
it. For inference only.
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from hfpatch.compat import operators
from hfpatch.compat.hooks import after, before, drop, new_key
from hfpatch.compat.modules import CONVOLUTIONS
from hfpatch.compat.modules import buffers as buffers_of
from hfpatch.model.rebuilt import HALF
from hfpatch.model.survey import Survey

Place = tuple[str, str]
"""Path of a module, and a name in it."""


def blocks_of(survey: Survey) -> list[nn.Module]:
    """The layers of every stack of an object."""
    return [layer for stacks in survey.stacks.values() for stack in stacks for _, layer in stack.layers]


def can_be_cast(tensor: torch.Tensor) -> bool:
    """True for plain floating-point weights of two bytes or more: those of one byte are codes, which need scales."""
    plain = type(tensor.data) in (torch.Tensor, nn.Parameter)
    return tensor.is_floating_point() and tensor.element_size() >= 2 and plain


@contextlib.contextmanager
def weights_as(model: nn.Module, dtype: torch.dtype, *, whole: bool = False) -> Generator[None]:
    """Run a model as if its floating-point weights were in another dtype, block by block. For inference only.

    The weights of a block (a layer of a stack) are cast while a forward of it, or of a part of it, runs; all others
    (embedding, head, projectors) for the whole run. So the extra memory is theirs and one block's, not a copy of
    the model. The parameters stay the same objects; only their `.data` is lent. What asks a block at rest for its
    dtype is told the lent one. Buffers in float16 or bfloat16 are cast as well, for the whole run.

    Args:
        model: It.
        dtype: Of the weights.
        whole: Cast all of them for the whole run, where a model reads the weights of a block outside of its forward.
    """
    inner = [] if whole else list(dict.fromkeys(part for block in blocks_of(Survey(model)) for part in block.modules()))
    ours = set(map(id, inner))
    outside = (p for m in model.modules() if id(m) not in ours for p in m.parameters(recurse=False))
    held: dict[nn.Parameter, torch.Tensor] = {}
    resting: dict[nn.Parameter, torch.Tensor] = {}
    calls: list[tuple[nn.Module, list[nn.Parameter]]] = []
    key = new_key()

    def begin(module: nn.Module, _args: Any) -> None:
        lent = [p for p in module.parameters() if p in resting and p.data.data_ptr() == resting[p].data_ptr()]
        for parameter in lent:
            parameter.data = held[parameter].to(dtype)
        calls.append((module, lent))

    def end(module: nn.Module, _args: Any, _output: Any) -> None:
        while calls:
            called, lent = calls.pop()
            for parameter in lent:
                parameter.data = resting[parameter]
            if called is module:
                return

    try:
        for parameter in outside:
            if can_be_cast(parameter) and parameter.dtype != dtype and parameter not in held:
                held[parameter] = parameter.data
                parameter.data = parameter.data.to(dtype)
        for parameter in itertools.chain.from_iterable(m.parameters(recurse=False) for m in inner):
            if can_be_cast(parameter) and parameter.dtype != dtype and parameter not in held:
                held[parameter] = parameter.data
                nothing = torch.full((1,), torch.nan, dtype=dtype, device=parameter.device)
                resting[parameter] = nothing.expand(parameter.shape)
                parameter.data = resting[parameter]
        for part in inner:  # before every other hook, so that casts that follow the weights see the lent ones
            before(part, begin, first=True, key=key)
            after(part, end, key=key)
        with buffers_as(model, _half_buffers_in(model, dtype)):
            yield
    finally:
        for part in inner:
            drop(part, [key])
        for parameter, data in held.items():
            parameter.data = data


@contextlib.contextmanager
def buffers_as(model: nn.Module, values: Mapping[Place, torch.Tensor]) -> Generator[None]:
    """Run a model with other values in some buffers, by module path and name; on their device, in their own dtype."""
    modules = dict(model.named_modules())
    held: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for (path, name), value in values.items():
            buffers: dict[str, Any] = buffers_of(modules[path])
            there = buffers[name]
            held.append((buffers, name, there))
            buffers[name] = value.to(there.device, copy=True)
        yield
    finally:
        for buffers, name, there in reversed(held):
            buffers[name] = there


def _half_buffers_in(model: nn.Module, dtype: torch.dtype) -> dict[Place, torch.Tensor]:
    return {
        (path, name): buffer.to(dtype)
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if buffer.dtype in HALF and buffer.dtype != dtype
    }


@contextlib.contextmanager
def as_it_was(model: nn.Module) -> Generator[None]:
    """Run a model in evaluation mode; put back whatever a forward changes, each module's mode and plain attributes,
    buffers and their values, and the random states.
    """
    modules = list(model.modules())
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    kept = [(m, dict(m.__dict__), dict(buffers_of(m))) for m in modules]
    values = {b: b.clone() for m in modules for b in m.buffers(recurse=False) if b.is_floating_point()}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            for module in modules:
                module.__dict__["training"] = False
            yield
        finally:
            for module, own, buffers in kept:
                _put_back(module.__dict__, own)
                _put_back(buffers_of(module), buffers)
            for buffer, value in values.items():
                if not torch.equal(buffer, value):
                    with torch.no_grad():
                        buffer.copy_(value)


def _put_back(now: dict[str, Any], was: dict[str, Any]) -> None:
    for name in [n for n in now if n not in was]:
        del now[name]
    now.update(was)


@contextlib.contextmanager
def parts_cast_their_input(model: nn.Module) -> Generator[None]:
    """Cast what goes into each submodel, and into each module with weights of its own, to the dtype of its weights.

    For models that cast by hand inside their forward, to a dtype that their parts do not have in this run. Where
    autocast casts by itself, it is left to do so.
    """
    survey = Survey(model)
    parts = [s.model for s in survey.submodels if s.path]
    layers = [m for m in model.modules() if any(can_be_cast(p) for p in m.parameters(recurse=False))]
    key = new_key()
    found = list(dict.fromkeys([*parts, *layers]))
    try:
        for module in found:
            before(module, _cast_arguments, with_kwargs=True, key=key)
        yield
    finally:
        for module in found:
            drop(module, [key])


def _cast_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    mapped = isinstance(module, (nn.Linear, CONVOLUTIONS))
    device = next(module.parameters()).device.type
    dtype = next((p.dtype for p in module.parameters() if can_be_cast(p)), None)
    if dtype is None or (mapped and torch.is_autocast_enabled(device)):
        return None

    return _cast(args, dtype), _cast(kwargs, dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in plain containers, cast."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and value.element_size() >= 2 else value
    if isinstance(value, ModelOutput):
        return type(value)(**{k: _cast(v, dtype) for k, v in value.items()})
    if type(value) is dict:
        return {k: _cast(v, dtype) for k, v in value.items()}
    return type(value)(_cast(v, dtype) for v in value) if type(value) in (list, tuple) else value


class CastsSeen(operators.DispatchMode):
    """Notes where a run makes float16 or bfloat16 of wider numbers.

    Attributes:
        places: File and line of the model's own code, with how often.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation, and look at it."""
        out = func(*args, **(kwargs or {}))
        if func is operators.to_copy and out.dtype in HALF and args[0].dtype in (torch.float32, torch.float64):
            where = _outside_torch()
            self.places[where] = self.places.get(where, 0) + 1
        return out


def _outside_torch() -> str:
    """File and line of the innermost frame that is neither torch's nor ours."""
    tools = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
    frames = (f for f in reversed(traceback.extract_stack(limit=40)) if not f.filename.startswith(tools))
    frame = next(frames, None)
    return "code that cannot be told" if frame is None else f"{Path(frame.filename).name}:{frame.lineno}"


@contextlib.contextmanager
def hearing_of_blocks(blocks: Iterable[nn.Module], tick: Callable[[], None]) -> Generator[None]:
    """Call a function each time a block begins."""
    key = new_key()
    listening = list(blocks)
    try:
        for block in listening:
            before(block, lambda *_: tick(), key=key)
        yield
    finally:
        for block in listening:
            drop(block, [key])
