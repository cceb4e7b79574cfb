"""Runs a model with its weights and buffers in another dtype, for inference only.

Other parameters stand in the places of the model's own ones, which are not touched. Everything that a run changes is
restored at its end, even after an error.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from hfpatch.compat import operators
from hfpatch.compat.accelerate import FORWARD
from hfpatch.compat.hooks import after, before, drop, new_key
from hfpatch.compat.modules import CONVOLUTIONS
from hfpatch.compat.modules import buffers as buffers_of
from hfpatch.compat.modules import parameters as parameters_of
from hfpatch.compat.quantising.quantised import Coded, changed_by_a_run, coded, put_back
from hfpatch.model.evaluating.as_trained import in_evaluation_form
from hfpatch.model.rebuilt import HALF
from hfpatch.model.survey import Survey

Place = tuple[str, str]
"""Path of a module, and a name in it."""


def blocks_of(survey: Survey) -> list[nn.Module]:
    """Return the layers of every stack of an object."""
    return [layer for stacks in survey.stacks.values() for stack in stacks for _, layer in stack.layers]


def can_be_cast(tensor: torch.Tensor) -> bool:
    """True for plain floating-point weights of two bytes or more: one-byte weights are quantised and need scales."""
    plain = type(tensor.data) in (torch.Tensor, nn.Parameter)
    return tensor.is_floating_point() and tensor.element_size() >= 2 and plain


@contextlib.contextmanager
def weights_as(model: nn.Module, dtype: torch.dtype, *, whole: bool = False) -> Generator[None]:
    """Run a model with its floating-point weights in another dtype, block by block. For inference only.

    The weights of a block (a layer of a stack) are cast while its forward, or that of one of its parts, runs; all
    other weights (embedding, head, projectors) are cast for the whole run. The extra memory is that of these weights
    and of one block, not of a copy of the model. In the place of each parameter stands another one meanwhile. The
    parameter itself is not touched: if its `.data` got another dtype, autograd would forget the hooks with which DDP
    averages gradients. A block that is not running has the new dtype and NaN as its values. Buffers in float16 or
    bfloat16 are cast too, for the whole run.

    Args:
        model: The model.
        dtype: Dtype of the weights.
        whole: Cast all weights for the whole run, for a model that reads the weights of a block outside its forward.
    """
    inner = [] if whole else list(dict.fromkeys(part for block in blocks_of(Survey(model)) for part in block.modules()))
    lent = _Lent(model, dtype)
    resting: dict[nn.Parameter, nn.Parameter] = {}
    calls: list[tuple[nn.Module, list[nn.Parameter]]] = []
    key = new_key()

    def begin(module: nn.Module, _args: Any) -> None:
        asleep = [p for part in module.modules() for p in lent.of.get(part, ()) if lent.now.get(p) is resting.get(p, p)]
        for parameter in asleep:
            lent.put(parameter, parameter.detach().to(dtype))
        calls.append((module, asleep))

    def end(module: nn.Module, _args: Any, _output: Any) -> None:
        while calls:
            called, awake = calls.pop()
            for parameter in awake:
                lent.put(parameter, resting[parameter])
            if called is module:
                return

    try:
        inside = set(map(id, inner))
        for module in model.modules():
            for parameter in lent.of.get(module, ()):
                if id(module) not in inside and parameter not in lent.now:
                    lent.put(parameter, parameter.detach().to(dtype))
        for module in inner:
            for parameter in lent.of.get(module, ()):
                if parameter not in lent.now:
                    nothing = torch.full((1,), torch.nan, dtype=dtype, device=parameter.device)
                    resting[parameter] = lent.put(parameter, nothing.expand(parameter.shape))
        for part in inner:  # before every other hook, so casts that follow the weights see the new dtype
            before(part, begin, first=True, key=key)
            after(part, end, key=key)
        with buffers_as(model, _half_buffers_in(model, dtype)), unpacked(model, dtype):
            yield
    finally:
        for part in inner:
            drop(part, [key])
        lent.restore()


class _Lent:
    """Other parameters in the places of a model's own ones.

    They are set as attributes, because torch's recurrent layers keep a list of theirs that only this updates.

    Attributes:
        of: The parameters of each module that a run in another dtype replaces, as it found them.
        now: What stands in the place of each parameter that is replaced.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.of: dict[nn.Module, list[nn.Parameter]] = {}
        self.now: dict[nn.Parameter, nn.Parameter] = {}
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in parameters_of(module).items():
                if parameter is not None and can_be_cast(parameter) and parameter.dtype != dtype:
                    self.of.setdefault(module, []).append(parameter)
                    self._places.setdefault(parameter, []).append((module, name))

    def put(self, parameter: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
        """Set a value, of any dtype, in every place of a parameter; returns what stands there now."""
        other = value if isinstance(value, nn.Parameter) else nn.Parameter(value, parameter.requires_grad)
        self.now[parameter] = other
        for module, name in self._places[parameter]:
            setattr(module, name, other)
        return other

    def restore(self) -> None:
        """Set every parameter in its places again."""
        for parameter in self.now:
            for module, name in self._places[parameter]:
                setattr(module, name, parameter)
        self.now.clear()


@contextlib.contextmanager
def unpacked(model: nn.Module, dtype: torch.dtype) -> Generator[None]:
    """Run a model in float32 with quantised maps that multiply by their unpacked weights, unpacked at each call.

    Those that compute in the dtype of their input stay as they are, and so do all in half precision.
    """
    held: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in model.modules() if dtype.itemsize >= 4 else ():
            found = coded(module)
            if found is not None and not found.follows:
                key = FORWARD if FORWARD in module.__dict__ else "forward"
                held.append((module.__dict__, key, module.__dict__.get(key)))
                module.__dict__[key] = partial(_unpacked_map, module, found, dtype)
        yield
    finally:
        for table, key, was in held:
            if was is None:
                del table[key]
            else:
                table[key] = was


def _unpacked_map(module: Any, found: Coded, dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    bias = None if module.bias is None else module.bias.to(dtype)
    return nn.functional.linear(x.to(dtype), found.values().detach().to(dtype), bias)


@contextlib.contextmanager
def buffers_as(model: nn.Module, values: Mapping[Place, torch.Tensor]) -> Generator[None]:
    """Run a model with other values for some buffers, by module path and name. The values are moved to their device."""
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
    """Run a model in evaluation mode, and restore afterwards what a forward may change: the mode and attributes of
    each module, buffers and their values, weights that evaluation divides (RWKV), and the random states.
    """
    modules = list(model.modules())
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    kept = [(m, dict(m.__dict__), dict(buffers_of(m))) for m in modules]
    values = {b: b.clone() for m in modules for b in m.buffers(recurse=False) if b.is_floating_point()}
    packed = changed_by_a_run(modules)
    with torch.random.fork_rng(devices=list(devices)):
        try:
            for module in modules:
                module.__dict__["training"] = False
            with in_evaluation_form(model):
                yield
        finally:
            for module, own, buffers in kept:
                _put_back(module.__dict__, own)
                _put_back(buffers_of(module), buffers)
            put_back(packed)
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
    """Cast the input of each submodel, and of each module with weights, to the dtype of its weights.

    For models whose forward casts to a dtype that their parts do not have in this run. The inputs of linear layers
    and convolutions are left to autocast if it is enabled.
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

    return cast_floats(args, dtype), cast_floats(kwargs, dtype)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return a value with the floating-point tensors in it, also in plain containers, cast."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and value.element_size() >= 2 else value
    if isinstance(value, ModelOutput):
        return type(value)(**{k: cast_floats(v, dtype) for k, v in value.items()})
    if type(value) is dict:
        return {k: cast_floats(v, dtype) for k, v in value.items()}
    return type(value)(cast_floats(v, dtype) for v in value) if type(value) in (list, tuple) else value


class CastsSeen(operators.DispatchMode):
    """Records where a run casts wider numbers to float16 or bfloat16.

    Attributes:
        places: Number of casts by file and line of the model's own code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation, and record it if it is such a cast."""
        out = func(*args, **(kwargs or {}))
        if func is operators.to_copy and out.dtype in HALF and args[0].dtype in (torch.float32, torch.float64):
            where = _outside_torch()
            self.places[where] = self.places.get(where, 0) + 1
        return out


def _outside_torch() -> str:
    """Return file and line of the innermost frame outside torch and hfpatch."""
    tools = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
    frames = (f for f in reversed(traceback.extract_stack(limit=40)) if not f.filename.startswith(tools))
    frame = next(frames, None)
    return "unknown code" if frame is None else f"{Path(frame.filename).name}:{frame.lineno}"


@contextlib.contextmanager
def at_each_block(blocks: Iterable[nn.Module], tick: Callable[[], None]) -> Generator[None]:
    """Call a function at the start of each block's forward."""
    key = new_key()
    listening = list(blocks)
    try:
        for block in listening:
            before(block, lambda *_: tick(), key=key)
        yield
    finally:
        for block in listening:
            drop(block, [key])
