"""`hfpatch.doctor`: everything that hfpatch can tell of a model on one batch. It only composes the other verbs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.doctoring.one_page import Diagnosis, Room
from hfpatch.doctoring.ways import FLOAT32, WAYS, Run, Way, bytes_of, clocked, copied, held_memory
from hfpatch.errors import InputError
from hfpatch.foretold import inspect
from hfpatch.given import MAPPING, want
from hfpatch.guarding.checking.hazards import check
from hfpatch.model.evaluating.full_float32 import full_float32, shortened
from hfpatch.model.put_back import as_before, device_of
from hfpatch.model.source import REJECTIONS
from hfpatch.model.survey import Survey
from hfpatch.model.walk import root_module
from hfpatch.model.wrapping import PARALLEL, unwrap
from hfpatch.patching.applied import Applied
from hfpatch.patching.apply import apply
from hfpatch.patching.status import status
from hfpatch.patching.verifying.answer import Answer, Batch, answer, prepared, score
from hfpatch.patching.verifying.compare import uncompiled
from hfpatch.patching.verifying.figures import Proof
from hfpatch.patching.verifying.lending import at_each_block, blocks_of, unpacked
from hfpatch.patching.verifying.need import measure
from hfpatch.patching.verifying.verify import verify
from hfpatch.report.progress import patience

TURNS = 2
"""Timed calls of each way."""


def doctor(model: object, args: Any = None, *, batch: Mapping[str, Any]) -> Diagnosis:
    """Examine a model on one batch: facts, hazards, room, plan, proof, and which way to run it here.

    It composes `inspect`, `check`, `plan`, `apply`, `verify` and `revert`. What patches would do is measured on a copy
    in float16, which shares no weight with the model: the patches are applied to it and lifted again. Each way to run
    the model is run: the error is the KL divergence from float32, and of those as good the leanest and then the fastest
    is the best. Training is looked at by `check` alone: one step, in the model's own dtype.

    Args:
        model: A module, wrapped or not, or an object whose `.model` is one (a Trainer), with its weights loaded. It is
            not changed.
        args: Training arguments, as for `hfpatch.check`.
        batch: Keyword arguments of the model: `input_ids [batch, tokens]` and any others.

    Returns:
        The diagnosis: one page in a terminal; `.to_html(path)` writes it as one self-contained file.

        Memory: a copy of the weights in half precision, one at a time. Time: about twenty forward passes, and at most
        3.5 training steps; lines on stderr tell where it is.

    Raises:
        NotAModelError: `model` holds no torch module.
        InputError: The batch does not run in float32, or the model returns no logits.
    """
    want("doctor", batch=(batch, MAPPING))
    root = root_module(model)
    tick = patience("doctor", first=2.0, every=5.0)
    ready = prepared(root, batch, "doctor")
    tick("facts")
    info = inspect(root)
    survey = Survey(root)
    with at_each_block(blocks_of(survey), lambda: tick("hazards, of one training step")):
        hazards = check(root, args, batch=batch)
    with as_before(root), uncompiled(survey):
        runs, half = _ways(root, ready, batch, tick)
    device, short = str(device_of(root)), shortened(root)
    return Diagnosis(info, hazards, half.rooms, half.fix.plan, half.proof, tuple(runs), half.lifted, device, short)


@dataclass(frozen=True)
class _Half:
    """What was learned on the float16 copy: the largest values, the plan applied, its proof, and what lifting left."""

    rooms: tuple[Room, ...]
    fix: Applied
    proof: Proof
    lifted: str


def _ways(
    root: nn.Module, ready: Batch, batch: Mapping[str, Any], tick: Callable[[str], None]
) -> tuple[list[Run], _Half]:
    """Return the runs of every way, and what was learned on the float16 copy."""
    runs: list[Run] = []
    exact: Answer | None = None
    half: _Half | None = None
    for dtype in dict.fromkeys(w.weights for w in WAYS):
        tick(f"a copy in {str(dtype).removeprefix('torch.')}")
        model = copied(root, dtype)
        blocks = blocks_of(Survey(model))
        for way in (w for w in _here(root) if w.weights == dtype):
            if not way.patched:
                with at_each_block(blocks, lambda way=way: tick(way.name)):
                    run, exact = _run(model, way, ready, exact)
                runs.append(run)
                continue
            tick("room, plan and proof, in float16")
            rooms = _rooms(model, batch)
            fix = apply(model, verbose=False, batch=batch)
            proof = (
                fix.verify(batch, runs=["before", "after"]) if _equal(fix) else verify(model, batch, runs="as it is")
            )
            if fix.edits:
                with at_each_block(blocks, lambda way=way: tick(way.name)):
                    runs.append(_run(model, way, ready, exact)[0])
            fix.revert()
            left = len(status(model).edits)
            lifted = f"NOT lifted: {left} edits" if left else "applied to a copy and lifted again: nothing is left"
            half = _Half(rooms, fix, proof, lifted if fix.edits else "")
        del model
    assert half is not None  # noqa: S101 - float16 is always among the ways
    order = [w.name for w in WAYS]
    return sorted(runs, key=lambda r: order.index(r.way.name)), half


def _rooms(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Room, ...]:
    """Return the residual streams with the largest value of each."""
    peaks, stacks = measure(model, batch, "doctor"), Survey(model).stacks.values()
    return tuple(Room(stack.path, peaks.stream((stack,))) for each in stacks for stack in each)


def _equal(fix: Applied) -> bool:
    """True if an edit is exact or equivalent, so that there is a run without it."""
    return any(d.edits and d.effect in ("exact", "equivalent") for d in fix.plan.of("applied"))


def _here(root: nn.Module) -> Sequence[Way]:
    """Return the ways that this device has: one without bfloat16 has none with it."""
    device = device_of(root)
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return [w for w in WAYS if torch.bfloat16 not in (w.weights, w.autocast)]
    return WAYS


def _run(model: nn.Module, way: Way, ready: Batch, exact: Answer | None) -> tuple[Run, Answer | None]:
    """Return what one way gives, and the answer in float32.

    Raises:
        InputError: It does not run in float32, or returns no logits.
    """
    device = device_of(model)
    inner = unwrap(model, PARALLEL)
    inputs = {
        k: v.to(way.weights) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in ready.inputs.items()
    }

    def call() -> Answer:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(way.region(device))
            if way == FLOAT32:
                stack.enter_context(unpacked(inner, torch.float32))
            return answer(inner, inputs)

    try:
        mine = call()
        if exact is None and shortened(inner):
            with full_float32(inner):
                exact = call()
        seconds = clocked(device, call, TURNS)
        peak, _ = held_memory(device, call)
    except REJECTIONS as error:
        if way == FLOAT32:
            raise InputError(f"doctor: the model does not run in float32 on this batch: {_line(error)}") from error
        return Run(way, None, math.nan, 0.0, math.nan, 0, _line(error)), exact
    exact = mine if exact is None else exact
    figures = score(way.name, mine, exact, ready.real)
    kl = figures.kl if figures.finite else math.nan
    return Run(way, figures.loss, kl, figures.top1, seconds, bytes_of(model) + peak), exact


def _line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
