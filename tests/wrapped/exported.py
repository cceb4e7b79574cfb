"""`torch.export`: the program of a patched model has the patch in its code; an exported program takes no patch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hfpatch
from hfpatch.errors import NotAModelError
from tests.cells import Outcome, call, close, ends, in_force, inputs
from tests.interrupts import SUBJECTS

STRICT = ("float32 inside",)
"""Kinds whose tensors torch traces only with `strict=True`."""


def exported(model: nn.Module, *, strict: bool = False) -> nn.Module:
    with torch.no_grad():
        return torch.export.export(model, (), {**inputs(model), "use_cache": False}, strict=strict).module()


def outputs(program: nn.Module, model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return program(**inputs(model), use_cache=False).logits.float()


def row(kind: str, order: str) -> Outcome:
    subject = SUBJECTS[kind]
    model = subject.make().eval()
    stock = call(model)
    if order == "before":
        program = exported(model)
        hfpatch.apply(program, only=subject.patch, verbose=False)
        return "FAILS", "an exported program was patched"
    plain = copy.deepcopy(model)
    hfpatch.apply(plain, only=subject.patch, verbose=False)
    wanted = call(plain)
    fix = hfpatch.apply(model, only=subject.patch, verbose=False)
    if kind in STRICT:
        with pytest.raises(RuntimeError, match="Creating a new Tensor subclass"):
            exported(model)
    program = exported(model, strict=kind in STRICT)
    in_force(fix, model)
    for verb in (hfpatch.status, hfpatch.revert):
        with pytest.raises(NotAModelError, match="runs what was traced"):
            verb(program)
    close(outputs(program, model), wanted)
    hfpatch.revert(model)
    ends(model, stock, "")
    places = {edit.change.in_checkpoint for d in fix.plan.of("applied") for edit in d.edits}
    if places == {"weights"}:  # the program holds the model's own parameters
        close(outputs(program, model), stock)
        return "works", "the program runs on the model's own parameters, so a revert of the model is one there too"
    close(outputs(program, model), wanted)
    return "works", "torch.export needs strict=True" if kind in STRICT else ""
