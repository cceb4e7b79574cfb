"""The output of a head, compared with the exact product of what it was given."""

from __future__ import annotations

from typing import Any

from torch import nn

from hfpatch.compat import hooks
from hfpatch.inspecting.facts import heads
from hfpatch.model.survey import Survey
from hfpatch.patching.verifying.trial import Trial


def away_from_product(trial: Trial) -> float:
    """Run a case, and return the relative L2 distance of its head's output from the product in float64."""
    survey = Survey(trial.model)
    module: Any = survey.modules[heads(survey)[0].path]
    away: list[float] = []

    def compare(_module: nn.Module, args: Any, output: Any) -> None:
        exact = args[0].double() @ module.weight.double().T
        away.append(float((output.double() - exact).norm() / exact.norm()))

    handle = hooks.after(module, compare)
    try:
        trial.logits()
    finally:
        handle.remove()
    return max(away)
