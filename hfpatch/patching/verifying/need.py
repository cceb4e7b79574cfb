"""Measures on a batch how near float16's maximum the values of a model come."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hfpatch.errors import InputError
from hfpatch.inspecting.peaks import Peaks, peaks_of
from hfpatch.model.evaluating.full_float32 import full_float32
from hfpatch.model.source import REJECTIONS
from hfpatch.model.survey import Survey
from hfpatch.model.wrapping import PARALLEL, unwrap
from hfpatch.patching.kinds.in_float32.scale_map import ScaleMap
from hfpatch.patching.kinds.scale_branch import ScaleBranch
from hfpatch.patching.record import logged
from hfpatch.patching.verifying.answer import prepared
from hfpatch.patching.verifying.compare import uncompiled
from hfpatch.patching.verifying.lending import as_it_was, cast_floats, parts_cast_their_input, weights_as
from hfpatch.patching.writing import suspended


def measure(model: nn.Module, batch: Mapping[str, Any], asks: str = "plan(batch=)") -> Peaks:
    """Run a model on a batch once, without a gradient, and return the largest value in each module.

    The weights are float32 while they are used, as in `hfpatch.verify`: float16 would hide what passes its maximum.
    Scaled branches run unscaled. Afterwards the model is as before.

    Args:
        model: The model.
        batch: Its keyword arguments: `input_ids [batch, tokens]` and any others.
        asks: The caller, for messages.

    Raises:
        InputError: The model cannot be run, or rejects the batch.
    """
    ready = prepared(model, batch, asks)
    inputs = cast_floats(ready.inputs, torch.float32)
    kinds = (ScaleBranch, ScaleMap)
    scaled = [(module, record) for _, module, record in logged(model) if isinstance(record.change, kinds)]

    def run(*, by_hand: bool) -> Peaks:
        device = next(model.parameters()).device.type
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(full_float32(model))
            stack.enter_context(suspended(model, scaled))
            stack.enter_context(as_it_was(model))
            stack.enter_context(weights_as(model, torch.float32, whole=by_hand))
            if by_hand:
                stack.enter_context(parts_cast_their_input(model))
            with peaks_of(model) as found:
                unwrap(model, PARALLEL)(**inputs)
        return Peaks({path: float(value) for path, value in found.items()})

    with uncompiled(Survey(model)):
        try:
            return _first_that_runs(lambda: run(by_hand=False), lambda: run(by_hand=True))
        except REJECTIONS as error:
            what = " ".join(str(error).split())
            raise InputError(
                f"{asks}: {type(model).__name__} does not run on this batch in float32, so nothing was measured: {what}"
            ) from error


def _first_that_runs(plain: Callable[[], Peaks], by_hand: Callable[[], Peaks]) -> Peaks:
    try:
        return plain()
    except RuntimeError:  # its own code casts, or reads the weights of a layer from outside
        return by_hand()
