"""Whether evaluation uses the adapters: its outputs beside training's, with dropout off and no half at 0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from hfpatch.guarding.checking.adapting.adapters import left_out
from hfpatch.guarding.checking.adapting.halves import Pair, pairs
from hfpatch.guarding.checking.forward_pass import Passed, apart
from hfpatch.guarding.checking.hazard import Hazard
from hfpatch.guarding.checking.measurement import Measurement, places
from hfpatch.guarding.checking.rehearsal import FORWARD
from hfpatch.guarding.checks import clean_name
from hfpatch.model.evaluating.as_trained import as_trained
from hfpatch.model.evaluating.divided import plain_weight, scaled_maps
from hfpatch.model.evaluating.fast_path import fast_layers, passed_over
from hfpatch.model.wrapping import held

TIMES = 10.0
"""Times the difference without the adapters from which one with them is the adapters'."""
WHAT = "that evaluation uses the adapters"


def evaluation(found: Measurement) -> Iterator[Hazard]:
    """Adapters that evaluation leaves out, or with which it computes something else than training."""
    if found.step.raised is not None:
        return
    both = pairs(found.subject)
    trained = [p for p in both if p.trains_a or p.trains_b]
    out = left_out(found.subject)
    yield from _changes_nothing([p for p in both if p.b not in out])
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
        yield Hazard(
            "adapter-not-in-eval",
            certain=True,
            reason=f"{len(skipped)} of {len(trained)} adapted layers run in training and not in evaluation "
            f"({places(skipped)}): with noise in place of halves that are 0, and without dropout, evaluation's outputs "
            f"are {difference:.2g} of their size away from training's",
            change=_instead_of_skipping(found, training, [p for p in trained if p.b in skipped]),
        )
    elif difference <= found.rounding:
        found.said.append(
            f"that evaluation computes with the {len(trained)} adapted layers as training does, with noise in place "
            f"of halves that are 0: outputs {difference:.1g} apart"
        )
    else:
        yield from _differs(found, trained, training, difference)


def _differs(found: Measurement, trained: list[Pair], training: Passed, difference: float) -> Iterator[Hazard]:
    """Outputs differ between the modes: by the adapters, if they do not without them, or by what a patch undoes."""
    apart = f"with noise in place of halves that are 0, and without dropout, evaluation's outputs are {difference:.2g} "
    cured = _as_trained(found, training)
    if cured is not None and cured.works:
        divided = [path for path in scaled_maps(found.subject.survey.modules.items()) if _is_adapted(found, path)]
        yield Hazard(
            "adapter-differs-in-eval",
            certain=True,
            reason=f"{apart}of their size away from training's: evaluation divides the weights under "
            f"{len(divided)} adapters ({places(divided)}), and not the adapters, so what these learn counts more there",
            change=f"{cured}, before training or after",
        )
        return
    if not found.affords((3 if training.drew else 2) * FORWARD):
        found.missed.append(
            f"why evaluation's outputs differ from training's without dropout, {difference:.2g} of their size: "
            "a check may cost 3.5 steps"
        )
        return
    again = _difference(training, found.forward(training=True, seed=1)) if training.drew else 0.0
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
        reason=f"{apart}of their size away from training's, and {base:.2g} without the adapters: what an adapter "
        "learns is not what evaluation adds",
        change="look for code that changes the weights under an adapter by self.training"
        + (f" (tried, and no remedy: {cured})" if cured is not None else ""),
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


@dataclass(frozen=True)
class _Cure:
    """An evaluation that computes as training does, as a patch makes it, tried on the batch.

    Attributes:
        line: The line that applies the patch.
        difference: How far its outputs are from training's, or why they cannot be compared.
        works: True if the adapted layers run and the outputs differ by rounding only.
        read: Ids of the parameters that were read.
    """

    line: str
    difference: float | str
    works: bool
    read: frozenset[int]

    def __str__(self) -> str:
        apart = self.difference if isinstance(self.difference, str) else f"outputs are {self.difference:.1g} apart then"
        return f"{self.line} (tried on this batch: {apart})"


def _as_trained(found: Measurement, training: Passed) -> _Cure | None:
    """Try an evaluation under what `encoder-fast-path` and `rwkv-rescale` set; None if neither has anything to set."""
    modules = found.subject.survey.modules
    divided = [path for path in scaled_maps(modules.items()) if _is_adapted(found, path)]
    passing = [layer for layer in fast_layers(modules.items()).values() if passed_over(layer)]
    if not divided and not passing:
        return None
    ids = [name for name, there in (("rwkv-rescale", divided), ("encoder-fast-path", passing)) if there]
    half = any(getattr(plain_weight(modules[path]), "dtype", None) == torch.float16 for path in divided)
    line = f"hfpatch.apply(model, only={ids[0] if len(ids) == 1 else ids!r}{', batch=batch' if half else ''})"
    if not found.affords(FORWARD):
        found.missed.append(f"evaluation under this advice, {line}: a check may cost 3.5 steps")
        return None
    passed = found.forward(within=as_trained(found.subject.called))
    difference = _difference(training, passed)
    works = not isinstance(difference, str) and difference <= found.rounding
    return _Cure(line, difference, works, passed.read)


def _is_adapted(found: Measurement, path: str) -> bool:
    return held(found.subject.survey.modules[path]) is not None


def _instead_of_skipping(found: Measurement, training: Passed, skipped: list[Pair]) -> str:
    """Return what to do about adapted layers that evaluation does not run: a patch that was tried, or where to look."""
    encoders = (nn.TransformerEncoderLayer, nn.TransformerEncoder)
    around = [(clean_name(n), m) for n, m in found.subject.model.named_modules() if isinstance(m, encoders)]
    owner = next((f"{n} ({type(m).__name__})" for n, m in reversed(around) if skipped[0].b.startswith(f"{n}.")), "")
    cured = _as_trained(found, training)
    if cured is not None and cured.works and all(id(p.low) in cured.read for p in skipped):
        return f"{owner} computes with the weights of its parts and does not call them in evaluation: {cured}"
    tried = f"{cured}; " if cured is not None else ""
    return f"{tried}look for code around these layers that asks for self.training; or leave them out of the adapter"
