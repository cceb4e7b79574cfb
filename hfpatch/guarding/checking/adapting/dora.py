"""DoRA over output rows that are all zero: it divides by their norm."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hfpatch.compat.modules import children
from hfpatch.compat.peft import is_off, switch
from hfpatch.guarding.checking.hazard import Hazard
from hfpatch.guarding.checking.measurement import NAMED, Measurement
from hfpatch.guarding.checking.rehearsal import FORWARD
from hfpatch.guarding.checking.subject import Subject
from hfpatch.guarding.checks import clean_name
from hfpatch.model.evaluating.divided import plain_weight

MAGNITUDES = "lora_magnitude_vector"


def zero_rows(subject: Subject, found: Measurement | None) -> Iterator[Hazard]:
    """Layers in which DoRA divides 0 by 0, by path and number of rows.

    Args:
        subject: The subject of the check.
        found: Its measurement, in which the advice is tried; None without a batch.
    """
    looked = {path: _zero_rows(layer) for path, layer in layers(subject).items()}
    bad = {path: rows for path, (rows, _) in looked.items() if rows}
    if not bad:
        return
    few = [f"{clean_name(path)}: {rows} of {looked[path][1]}" for path, rows in list(bad.items())[:NAMED]]
    more = f", and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
    names = [clean_name(path).rpartition("base_model.model.")[2] for path in list(bad)[:NAMED]]
    leave = f"leave them out (exclude_modules={names}{', and so on' if more else ''})"
    yield Hazard(
        "dora-zero-rows",
        certain=True,
        reason=f"{len(bad)} of {len(looked)} layers with DoRA have output rows that are all zero "
        f"({'; '.join(few)}{more}): DoRA divides each row by its norm, 0 by 0 is NaN, and such a layer returns NaN",
        change=f"{leave}, or adapt them without use_dora ({_tried(subject, found, list(bad))})",
    )


def layers(subject: Subject) -> dict[str, nn.Module]:
    """Return the layers that compute with DoRA in forward now, by path."""
    return {path: layer for path, layer in subject.survey.modules.items() if _runs_dora(layer)}


def _runs_dora(layer: Any) -> bool:
    return bool(children(layer).get(MAGNITUDES)) and not layer.merged and not is_off(layer) and bool(_active(layer))


def _active(layer: Any) -> list[str]:
    return [name for name in layer.active_adapters if name in layer.lora_magnitude_vector]


def _zero_rows(layer: Any) -> tuple[int, int]:
    """Return the number of outputs whose weights, the adapter's included, have a norm of 0, and of all outputs."""
    weight = plain_weight(layer.get_base_layer())
    if weight is None or weight.is_meta:
        return 0, 0
    embedding = any(name in layer.lora_embedding_A for name in _active(layer))
    axis = 1 if embedding or getattr(layer, "fan_in_fan_out", False) else 0
    zero = _norms(weight, axis) == 0
    for name in _active(layer) if bool(zero.any()) else ():
        zero &= _norms(weight + layer.get_delta_weight(name), axis) == 0
    return int(zero.sum()), len(zero)


@torch.no_grad()
def _norms(weight: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the norm of each output's weights, in the dtype of the weights as PEFT has it."""
    rows = weight.movedim(axis, 0).flatten(1)
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).to(weight.dtype)


def _tried(subject: Subject, found: Measurement | None, paths: Iterable[str]) -> str:
    """Return what came of a forward pass without the adapters of these layers."""
    if found is None:
        return "not tried: no batch="
    if not found.affords(FORWARD):
        return "not tried: a check may cost 3.5 steps"
    held = [subject.survey.modules[path] for path in paths]
    passed = found.forward(training=True, instead={}, within=_without(held))
    if passed.failed:
        return f"tried on this batch: {passed.failed}"
    if passed.loss is None:
        return "tried on this batch, which gives no loss"
    still = "" if math.isfinite(passed.loss) else " still"
    return f"tried on this batch without their adapters: the loss is {passed.loss:.4g}{still}"


@contextlib.contextmanager
def _without(held: Iterable[Any]) -> Generator[None]:
    """Switch the adapters of layers off; the pass that this is for puts the flags back."""
    for layer in held:
        switch(layer, layer.active_adapters, off=True)
    yield
