"""Each patch with `serves` on each architecture for which it is proved, towers too: as the proof ran it, and its life.

`tests/test_contract.py` has the same on one architecture of each kind.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import hfpatch
from hfpatch.model.walk import Walk
from hfpatch.patching import registry
from hfpatch.patching.proofs.prove import REJECTED, healthy, most_error, ways
from hfpatch.patching.verifying.trial import Trial, build
from tests.lives import live

pytestmark = pytest.mark.architectures

CAPTURED = ("clip_vision_model", "internvl_vision", "phi4_multimodal_vision", "qianfan_ocr_vision", "sam_vision_model")
NO_PICKLE = dict.fromkeys((("fp16-residual-overflow", name) for name in CAPTURED), "output_capturing_hook")
"""Towers whose model cannot be pickled once it has run, patched or not: hooks that transformers leaves in it."""

KNOWN = {("fp16-branch-overflow", "gemma4_text"): r"applied again to model\.layers\.0\.per_layer_projection"}
"""What fails, and how: the patch takes the stream's edit of a map for its own."""

SERVED = [(e, name) for e in registry.entries().values() if e.patch.serves for name in e.architectures]


def showing(entry: registry.Entry, architecture: str) -> Trial:
    """The first trial, of those that its proof ran, that shows the fault."""
    why: list[str] = []
    for case in [case for cases in ways(entry, architecture) for case in cases]:
        try:
            trial = build(case)
            if entry.patch.symptom(trial):
                return trial
            why.append(f"{case}: no symptom")
        except REJECTED as error:
            why.append(f"{case}: {error}")
    raise AssertionError("; ".join(why))


@pytest.mark.parametrize(("entry", "architecture"), [pytest.param(e, n, id=f"{e.id}-{n}") for e, n in SERVED])
def test_cured_and_lived(entry: registry.Entry, architecture: str) -> None:
    """Wrong without the patch; right with it, in a copy and from a pickle too; then bit for bit what it was."""
    trial = showing(entry, architecture)
    stock, answers = trial.logits(), []

    def right(model: nn.Module) -> None:
        answers.append(replace(trial, model=model).logits() if answers else trial.logits())
        assert torch.equal(answers[0], answers[-1])
        assert len(answers) > 1 or entry.patch.symptom(trial) is None

    batch: dict[str, Any] = {"batch": trial.inputs()} if trial.case.branches else {}
    if why := NO_PICKLE.get((entry.id, architecture)):
        with pytest.raises(AttributeError, match=why):
            pickle.dumps(trial.model)
    if known := KNOWN.get((entry.id, architecture)):
        with pytest.raises(AssertionError, match=known):
            live(entry, trial.model, right, **batch)
        return
    made = live(entry, trial.model, right, pickled=not why, **batch)
    homes = {d.submodel for d in made.of("applied") if d.patch == entry.id}
    assert architecture in {s.architecture for s in Walk(trial.model).submodels if s.path in homes}
    assert torch.equal(trial.logits().nan_to_num(7.0), stock.nan_to_num(7.0))

    well = build(healthy(trial.case))
    error = well.error(well.logits())
    hfpatch.apply(well.model, only=entry.id, verbose=False)
    assert well.error(well.logits()) <= most_error(entry, error)


def test_what_is_listed_is_served() -> None:
    assert {*NO_PICKLE, *KNOWN} <= {(entry.id, name) for entry, name in SERVED}
