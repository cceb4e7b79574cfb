"""One model on one batch, as it is and in other dtypes, against float32, with the patches it carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from hfpatch.errors import UnknownPatchError
from hfpatch.model.survey import Survey
from hfpatch.model.walk import root_module
from hfpatch.patching import registry
from hfpatch.patching.context import Context, Target
from hfpatch.patching.record import Record, logged
from hfpatch.patching.verifying.compare import Edited, compare
from hfpatch.patching.verifying.figures import Proof
from hfpatch.patching.writing import suspended

if TYPE_CHECKING:
    from hfpatch.patching.arguments import Names
    from hfpatch.patching.decision import Decisions


def verify(model: object, batch: Mapping[str, Any], *, runs: Names = None) -> Proof:
    """Run a model on a batch as it is, and in other dtypes, and hold each against float32 with the same weights.

    Patches that it carries are judged as `Applied.verify` does; without any, this compares dtypes. The loss is the
    model's own. The model is left as it was, and no second copy of its weights is made.

    Args:
        model: A module, however wrapped, or an object whose `.model` is one (a Trainer).
        batch: Keyword arguments of the model: `input_ids [batch, tokens]` and what else it takes. A causal model that
            is given no labels gets `input_ids`, without padding, as labels.
        runs: Names of the rows wanted, e.g. `["as it is", "bfloat16 weights"]`; all if not given.

    Returns:
        Loss, KL and top-1 of each row; on a GPU time and memory of a step. Prints as a table.

    Raises:
        NotAModelError: `model` holds no torch module.
        InputError: The batch does not run in float32, the model returns no logits, or there is no such row.
    """
    root = root_module(model)
    return compare(root, batch, _carried(root), runs)


def prove(
    root: nn.Module,
    made: Decisions,
    log: Sequence[tuple[nn.Module, Record]],
    batch: Mapping[str, Any],
    runs: Names = None,
) -> Proof:
    """Hold a model on a batch against float32, judging these records by the effects that a plan says they have."""
    effects = {(id(e.module), e.change.place, d.patch): d.effect for d in made.of("applied") for e in d.edits}
    edits = [Edited(m, r, str(effects.get((id(m), r.change.place, r.patch), "unknown"))) for m, r in log]
    return compare(root, batch, edits, runs)


def _carried(root: nn.Module) -> list[Edited]:
    """Every edit a model carries, with the effect it has on this model, for whoever lost the handle."""
    log = [(module, record) for _, module, record in logged(root)]
    out: list[Edited] = []
    for patch in dict.fromkeys(record.patch for _, record in log):
        mine = [(m, r) for m, r in log if r.patch == patch]
        out += [Edited(m, r, effect) for (m, r), effect in zip(mine, _effects(root, patch, mine), strict=True)]
    return out


def _effects(root: nn.Module, patch: str, log: Sequence[tuple[nn.Module, Record]]) -> list[str]:
    try:
        effect = registry.get(patch).patch.effect
    except UnknownPatchError:  # of a package that is not installed here
        return ["unknown"] * len(log)
    if not callable(effect):
        return [effect] * len(log)
    options = registry.get(patch).patch.options
    out: list[str] = []
    with suspended(root, log):
        survey = Survey(root)
        for module, _ in log:
            path = survey.path(module)
            holder = survey.holder(path)
            context = Context(survey, holder, None, options)
            out.append(effect(context, Target(path, module)) if holder is not None else "changes-function")
    return out
