"""Patches on trial: applied to the model, a kept call run again under a trace, and everything put back."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hfpatch.compat.operators import alone
from hfpatch.model.kept_state import is_own
from hfpatch.model.put_back import as_before
from hfpatch.model.walk import inside
from hfpatch.model.wrapping import RUN_AGAIN, kind_of, unwrapped
from hfpatch.patching.apply import apply
from hfpatch.symptoms import FINITE
from hfpatch.tracing.calls import Call, Kept
from hfpatch.tracing.finding import Finding
from hfpatch.tracing.rerun_block import first_line, obstacle
from hfpatch.tracing.tensors import DEPTH, floating
from hfpatch.tracing.trace import Trace

SHARDED = "its parameters are sharded over ranks: running it again would wait for the others"


@dataclass(frozen=True)
class Outcome:
    """What came of a call that was run again.

    Attributes:
        fault: The first fault in words; empty if every tensor of the run is finite, or not finite on purpose.
        finding: The same as the tracer's finding; None if there is no fault, or only a parameter's gradient is bad.
        scaled: True if gradients are not finite for their loss scale alone, which a GradScaler lowers.
        raised: Why the call could not be run to its end; empty if it was.
        short_of_memory: True if that was for want of memory.
    """

    fault: str = ""
    finding: Finding | None = None
    scaled: bool = False
    raised: str = ""
    short_of_memory: bool = False

    @property
    def finite(self) -> bool:
        """True if the call was run and nothing was wrong."""
        return not (self.fault or self.raised)


def whole_call(root: nn.Module, kept: Kept) -> Call | str:
    """Return the kept call of the model inside DDP and the like; a sentence on why it cannot be run again.

    Args:
        root: The traced module.
        kept: The calls of the step.
    """
    if kept.changed:
        return kept.changed
    path, inner = unwrapped("", root, RUN_AGAIN)
    call = kept.calls.get((path, 0))
    if call is None:
        return f"no call of {path or 'the model'} was kept"
    if any((kind_of(type(m)) or "").startswith("FSDP") for m in inner.modules()):
        return SHARDED
    held = {f"attribute {name!r} of {path or 'the model'}": v for path, name, v in _attributes(inner)}
    used_up = next((name for name, value in held.items() if isinstance(value, Iterator)), None)
    return obstacle(call) or (f"{used_up} is an iterator, which a run uses up" if used_up else call)


def run_again(
    root: nn.Module, call: Call, finding: Finding, patches: Collection[str] = (), *, measured: bool = False
) -> Outcome:
    """Run a kept call again with patches, which are applied as `hfpatch.apply(root, only=patches)` applies them.

    The call is that of the model inside its parallel wrappers, so no other rank is waited for. It runs under a trace,
    because a finite output alone proves little: attention on a CPU turns NaN into zeros. For a fault of the backward
    pass gradients are taken from those that the outputs got, by `torch.autograd.grad`. Everything is put back:
    patches, parameters, `.grad`, buffers, attributes, caches, modes and random states.

    Args:
        root: The traced module.
        call: From `whole_call`.
        finding: The fault that the patches should fix.
        patches: Ids; none runs the call as it is.
        measured: Apply them with `batch=`: the arguments of the call, as keyword arguments.
    """
    backward = finding.phase in ("backward", "gradients")
    try:
        batch = _by_name(call) if measured else None
        with torch.inference_mode(mode=False), as_before(root), _patched(root, patches, batch):
            return _run(call, finding, backward=backward)
    except (torch.OutOfMemoryError, MemoryError):
        return Outcome(raised="there is not enough memory to run the call again", short_of_memory=True)
    except Exception as error:  # noqa: BLE001 - the model's code may raise anything when it is run a second time
        return Outcome(raised=f"running the call again failed: {first_line(error)}")


@contextmanager
def _patched(root: nn.Module, patches: Collection[str], batch: Mapping[str, Any] | None) -> Generator[None]:
    if not patches:
        yield
        return
    with apply(root, only=list(patches), verbose=False, batch=batch):
        yield


def _by_name(call: Call) -> dict[str, Any]:
    """Return the arguments of a call as keyword arguments.

    Raises:
        TypeError: An argument was given by position, and the signature has no name for it.
    """
    args, kwargs = call.arguments()
    parameters = inspect.signature(call.module.forward).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(names):
        raise TypeError("batch= takes keyword arguments, and the call gave one by position that has no name")
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _run(call: Call, finding: Finding, *, backward: bool) -> Outcome:
    given: list[torch.Tensor] = []
    args, kwargs = (_copied(part, given) for part in call.arguments())
    traced = Trace(call.module, backward=backward)
    bad: list[str] = []
    with alone(), call.as_it_was(), torch.inference_mode(call.inference):
        if call.module.training != call.training:
            call.module.train(call.training)
        with traced, torch.set_grad_enabled(backward):
            output = nn.Module.__call__(call.module, *args, **kwargs)
            if backward:
                if any(not bool(g.isfinite().all()) for g in call.grads.values()):
                    return Outcome(raised="the gradients that came into the model were not finite")
                bad = _bad_gradients(call, dict(floating(output)), given)
    place = traced.places.enclosing(finding.module.removeprefix(call.path).removeprefix("."))
    if not any(e.role == "output" and inside(e.module, place or "") for step in traced.steps for e in step.events):
        return Outcome(raised=f"when the call was run again, {place or 'the model'} was not run")
    findings = [f for f in traced.findings if f.symptom not in FINITE or f.symptom == finding.symptom]
    found = next((f for f in findings if not f.ordinary), None)
    if found is not None:
        found = replace(found, module=f"{call.path}.{found.module}".strip("."))
        still = "there" if found.symptom in FINITE else "NaN" if "NaN" in found.holds else "Inf"
        return Outcome(f"still {still}: {found.fault}", found)
    if findings:
        return Outcome(scaled=True)
    more = f" and those of {len(bad) - 1} more" if len(bad) > 1 else ""
    return Outcome(f"still gradients that are not finite, of {bad[0]}{more}" if bad else "")


def _bad_gradients(call: Call, outputs: dict[str, torch.Tensor], given: list[torch.Tensor]) -> list[str]:
    """Return the names of the parameters whose gradients are not finite.

    Raises:
        RuntimeError: The outputs have no autograd graph.
    """
    named = [(n, p) for n, p in call.module.named_parameters() if p.requires_grad]
    pairs = [(outputs[n], g) for n, g in call.grads.items() if n in outputs and outputs[n].requires_grad]
    ends = [*(p for _, p in named), *given]
    if not pairs or not ends:
        raise RuntimeError("its outputs have no autograd graph")
    starts = [g.to(out.dtype) for out, g in pairs]
    given_back: Any = torch.autograd.grad([o for o, _ in pairs], ends, starts, allow_unused=True)
    return [n for (n, _), g in zip(named, given_back, strict=False) if g is not None and not bool(g.isfinite().all())]


def _copied(value: Any, leaves: list[torch.Tensor], depth: int = DEPTH) -> Any:
    """Return arguments whose containers and objects a forward may write to, and not the caller's.

    A tensor that requires a gradient becomes a leaf, which is added to `leaves`; caches are copies already.
    """
    if isinstance(value, torch.Tensor):
        if not value.requires_grad:
            return value
        leaf = value.detach().requires_grad_()
        leaves.append(leaf)
        return leaf
    if depth and type(value) in (list, tuple):
        return type(value)(_copied(part, leaves, depth - 1) for part in value)
    if depth and type(value) is dict:
        return {key: _copied(part, leaves, depth - 1) for key, part in value.items()}
    if is_own(value) or (type(value).__module__.startswith("transformers.models.") and not isinstance(value, dict)):
        return copy.deepcopy(value)
    return value


def _attributes(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            yield path, name, value
