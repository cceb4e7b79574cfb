"""Advice that is tried on the batch before it is given, within the budget of a check."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import nn

from hfpatch.guarding.checking.measurement import Measurement
from hfpatch.guarding.checking.rehearsal import Rehearsal
from hfpatch.lab.cut_off import trained_behind
from hfpatch.lab.written import to_copy

OTHER_KIND = "gradient_checkpointing_kwargs={'use_reentrant': False}"
INPUTS = "model.enable_input_require_grads()"
PATCH = 'hfpatch.apply(model, include=["{}"])'


@dataclass(frozen=True)
class Advice:
    """One piece of advice: its words, and the step under it (the arguments of `Measurement.run`)."""

    words: str
    reentrant: bool | None
    inputs: bool | None = None
    copied: tuple[nn.Module, ...] = ()

    def tried(self, found: Measurement, of: Collection[str] | None = None) -> Rehearsal | None:
        """Return the step under this advice; None, and a line on what was not looked at, if the budget is spent.

        Args:
            found: The measurement that the advice is for.
            of: Names of the parameters whose gradients are wanted; None for all that train.
        """
        if not found.affords():
            found.missed.append(f"a step under this advice, {self.words}: a check may cost 3.5 steps")
            return None
        return found.run(reentrant=self.reentrant, inputs=self.inputs, copied=self.copied, of=of)


@dataclass(frozen=True)
class CutOff:
    """Parameters that checkpointing cuts off, and what to change.

    Attributes:
        freed: Names of the parameters that get a gradient under the advice.
        change: The advice, which was tried.
    """

    freed: list[str]
    change: str


def instead_of_raising(found: Measurement) -> str:
    """Return advice under which the step runs, tried one after the other; empty if none does."""
    for advice in _without_raising(found):
        step = advice.tried(found)
        if step is not None and step.raised is None and (step.backward or step.loss is None):
            return f"{advice.words} (tried on this batch: the step runs)"
    return ""


def _without_raising(found: Measurement) -> Iterator[Advice]:
    raised = found.step.raised
    leaf = raised is not None and raised.written is not None
    checkpointed = found.asked is not None
    if leaf and (copied := to_copy(found.subject.survey)):
        yield Advice(PATCH.format("clone-embeds"), reentrant=found.asked, copied=tuple(copied.values()))
    if found.reentrant and not leaf:  # the kind of checkpointing does not matter to a leaf
        yield Advice(OTHER_KIND, reentrant=False)
    if leaf and checkpointed:
        yield Advice(
            "model.gradient_checkpointing_enable({'use_reentrant': False}), then "
            "model.disable_input_require_grads(), and no gradient_checkpointing in the arguments",
            reentrant=False,
            inputs=False,
        )
    elif leaf and found.subject.checkpoints_reentrant:
        yield Advice(f"model.disable_input_require_grads(), and {OTHER_KIND}", reentrant=False, inputs=False)
    elif leaf:
        yield Advice("model.disable_input_require_grads()", reentrant=None, inputs=False)
    if checkpointed:
        yield Advice("leave gradient_checkpointing out for this model", reentrant=None)


def instead_of_cutting_off(found: Measurement, dead: list[str]) -> CutOff | None:
    """Return which of the parameters without a gradient get one under which advice; None if checkpointing is not it."""
    for advice in _without_cutting_off(found):
        step = advice.tried(found, dead)
        if step is None or step.raised is not None:
            continue
        freed = [n for n in dead if found.step.gradients[n] is None and step.gradients.get(n) is not None]
        if freed or not advice.copied:  # what checkpointing of the other kind does not free, it did not cut off
            return CutOff(freed, f"{advice.words} (tried on this batch: all of them get one)") if freed else None
    return None


def _without_cutting_off(found: Measurement) -> Iterator[Advice]:
    survey, asked = found.subject.survey, True if found.asked else None
    starts = [survey.modules[start.feeders[0]] for start in trained_behind(survey) if not start.why_not]
    if starts:
        yield Advice(PATCH.format("tower-input-grads"), reentrant=asked, copied=tuple(starts))
    yield Advice(OTHER_KIND, reentrant=False)
    yield Advice(INPUTS, reentrant=asked, inputs=True)
