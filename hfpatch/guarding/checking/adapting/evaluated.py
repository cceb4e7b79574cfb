"""Whether evaluation uses the adapters: its outputs beside training's, with dropout off and no half at 0."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from hfpatch.guarding.checking.adapting.adapters import left_out
from hfpatch.guarding.checking.adapting.halves import Pair, pairs
from hfpatch.guarding.checking.forward_pass import Passed, apart
from hfpatch.guarding.checking.hazard import Hazard
from hfpatch.guarding.checking.measurement import Measurement, places
from hfpatch.guarding.checking.rehearsal import FORWARD
from hfpatch.guarding.checks import clean_name

TIMES = 10.0
"""Times the difference without the adapters from which one with them is the adapters'."""
WHAT = "that evaluation uses the adapters"


def evaluation(found: Measurement) -> Iterator[Hazard]:
    """Adapters that evaluation leaves out, or with which it computes something else than training."""
    if found.step.raised is not None:
        return
    held = pairs(found.subject)
    trained = [p for p in held if p.trains_a or p.trains_b]
    out = left_out(found.subject)
    yield from _changes_nothing([p for p in held if p.b not in out])
    if not trained:
        return
    if not found.affords(FORWARD + found.evaluation_cost):
        found.missed.append(f"{WHAT}: a check may cost 3.5 steps")
        return
    evaluated, training = found.evaluated, found.forward(training=True)
    difference = _difference(training, evaluated)
    if isinstance(difference, str):
        found.missed.append(f"{WHAT}: {difference}")
        return
    skipped = [p.b for p in trained if id(p.low) in training.read - evaluated.read]
    if skipped:
        found.said.append(f"which adapted layers run in evaluation, {len(trained) - len(skipped)} of {len(trained)}")
        owner = _owner(found.subject.model, skipped[0])
        yield Hazard(
            "adapter-not-in-eval",
            certain=True,
            reason=f"{len(skipped)} of {len(trained)} adapted layers run in training and not in evaluation "
            f"({places(skipped)}): with noise in place of halves that are 0, and without dropout, evaluation's outputs "
            f"are {difference:.2g} of their size away from training's",
            change=f"{owner} computes with the weights of its parts and does not call them in evaluation: "
            "hfpatch.apply(model, only='encoder-fast-path') before training, or leave these layers out of the adapter"
            if owner
            else "look for code around these layers that asks for self.training; or leave them out of the adapter",
        )
    elif difference <= found.rounding:
        found.said.append(
            f"that evaluation computes with the {len(trained)} adapted layers as training does, with noise in place "
            f"of halves that are 0: outputs {difference:.1g} apart"
        )
    else:
        yield from _differs(found, trained, training, difference)


def _differs(found: Measurement, trained: list[Pair], training: Passed, difference: float) -> Iterator[Hazard]:
    """Outputs differ between the modes: by the adapters, if they do not without them."""
    if not found.affords((3 if training.drew else 2) * FORWARD):
        found.missed.append(
            f"why evaluation's outputs differ from training's without dropout, {difference:.2g} of their size: "
            "a check may cost 3.5 steps"
        )
        return
    again = _difference(training, found.forward(training=True, seed=1))
    if isinstance(again, str) or again > found.rounding:
        found.missed.append(
            f"{WHAT}: two passes in training mode differ, so something is drawn at random besides dropout"
        )
        return
    without = {p.high: torch.zeros_like(p.high) for p in trained}
    base = _difference(*(found.forward(training=mode, instead=without) for mode in (True, False)))
    if isinstance(base, str):
        found.missed.append(f"{WHAT}: {base}")
        return
    if difference <= TIMES * base:
        found.said.append(
            f"outputs of evaluation and of training without dropout, {difference:.2g} apart, and {base:.2g} without "
            "the adapters: the model itself computes something else in evaluation"
        )
        return
    yield Hazard(
        "adapter-differs-in-eval",
        certain=True,
        reason=f"with noise in place of halves that are 0, and without dropout, evaluation's outputs are "
        f"{difference:.2g} of their size away from training's, and {base:.2g} without the adapters: what an adapter "
        "learns is not what evaluation adds",
        change="look for code that changes the weights under an adapter by self.training (RWKV divides them: "
        "rescale_every=0 in its config)",
    )


def _changes_nothing(held: list[Pair]) -> Iterator[Hazard]:
    """Adapters that do not train and are 0."""
    zero = [p for p in held if not p.trains_a and not p.trains_b and (p.zero_b or p.zero_a)]
    if not zero:
        return
    every = len(zero) == len(held)
    how = "as of an adapter of which no weight was loaded" if every else "which the adapter does not change"
    yield Hazard(
        "adapter-changes-nothing",
        certain=every,
        reason=f"one half is 0 and neither is trained in {len(zero)} of {len(held)} adapted layers, {how} "
        f"({places([p.b for p in zero])})",
        change="hfpatch.scan(folder, model=model) says which of the adapter's tensors fit this model; "
        "is_trainable=True if it is to be trained",
    )


def _difference(training: Passed, evaluated: Passed) -> float | str:
    """Return how far the outputs of two passes are apart, or why they cannot be compared."""
    if failed := training.failed or evaluated.failed:
        return failed
    one, other = training.logits, evaluated.logits
    if one is None or other is None:
        return "the output holds no tensor of floats"
    if one.shape != other.shape:
        return f"outputs have the shapes {tuple(one.shape)} in training and {tuple(other.shape)} in evaluation"
    return apart(one, other)


def _owner(model: nn.Module, name: str) -> str:
    """Return the path and class of torch's encoder layer around a parameter; empty without one."""
    encoders = (nn.TransformerEncoderLayer, nn.TransformerEncoder)
    around = [(clean_name(n), m) for n, m in model.named_modules() if isinstance(m, encoders)]
    inside = [(n, m) for n, m in around if name.startswith(f"{n}.")]
    return f"{inside[-1][0]} ({type(inside[-1][1]).__name__})" if inside else ""
