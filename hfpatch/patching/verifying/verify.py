"""`hfpatch.verify`: a patched or unpatched model on a batch, compared with float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

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
    """Run a model on a batch as it is and in other dtypes, and compare each run with float32 with the same weights.

    If the model carries patches, they are measured as by `Applied.verify`; otherwise this compares dtypes. The loss is
    the model's own. The model is not changed, and no second copy of its weights is made.

    Args:
        model: A module, wrapped or not, or an object whose `.model` is one (a Trainer).
        batch: Keyword arguments of the model: `input_ids [batch, tokens]` and any others. A causal model without labels
            gets `input_ids`, without padding, as labels.
        runs: Names of the rows to run, e.g. `["as it is", "bfloat16 weights"]`; None for all.

    Returns:
        Loss, KL divergence and top-1 agreement of each row; on a GPU also time and memory of a forward pass. Prints as
        a table.

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
    """Compare a model on a batch with float32; the effects of its edits are those in the plan."""
    effects = {(id(e.module), e.change.place, d.patch): d.effect for d in made.of("applied") for e in d.edits}
    edits = [Edited(m, r, str(effects.get((id(m), r.change.place, r.patch), "unknown"))) for m, r in log]
    return compare(root, batch, edits, runs)


def _carried(root: nn.Module) -> list[Edited]:
    """Return every edit that a model carries, with its effect on this model."""
    log = [(module, record) for _, module, record in logged(root)]
    out: list[Edited] = []
    for patch in dict.fromkeys(record.patch for _, record in log):
        mine = [(m, r) for m, r in log if r.patch == patch]
        out += [Edited(m, r, effect) for (m, r), effect in zip(mine, _effects(root, patch, mine), strict=True)]
    return out


def _effects(root: nn.Module, patch: str, log: Sequence[tuple[nn.Module, Record]]) -> list[str]:
    entry = registry.known(patch)
    if entry is None:  # not registered in this process, or of a package that was not asked for in it
        return ["unknown"] * len(log)
    effect, options = entry.patch.effect, entry.patch.options
    if not callable(effect):
        return [effect] * len(log)
    out: list[str] = []
    with suspended(root, log):
        survey = Survey(root)
        for module, _ in log:
            path = survey.path(module)
            holder = survey.holder(path)
            context = Context(survey, holder, None, options)
            out.append(effect(context, Target(path, module)) if holder is not None else "changes-function")
    return out
