"""Computes the scores of sparse indexers in float32 under autocast.

Autocast rounds the scores of sparse indexers (DeepSeek-V3.2 and ten others), so other positions are attended to. The
indexer runs in float32. By default: yes.

## What goes wrong
DeepSeek-V3.2 and models like it attend only to the positions that an indexer scores highest. It multiplies
`q.float()` by `k.float()`, because nearly equal scores decide; autocast casts both back, and also rounds the weights
of its heads and their sum. The positions that are chosen then differ from those in float32, and no loss tells so. In
float16 a score above 65,504 is inf.

## What this changes
Under autocast, the indexer's forward runs outside it, its inputs and its weights in float32. Without autocast nothing
changes, and nothing has to: the product is float32 there.

## Numerics
equivalent: the positions are those that are chosen in float32, for the same input of the indexer.
`benchmarks/indexers.py` has the figures of eleven architectures. Cost: the projections of the indexer and its cache of
keys are float32; half-precision weights are converted at each call.

## Known limits
Tested on tiny random models. What enters the indexer is rounded by autocast before. DataParallel is not served: its
replicas would run the forward of the first.

## Sources
deepseek-ai/DeepSeek-V3.2-Exp (the indexer); MaxText's float32 indexer logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.patching import edits, select
from hfpatch.patching.language import Case, Needed, NotNeeded, Patch, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hfpatch.patching.context import Context, Target
    from hfpatch.patching.verifying.trial import Trial

FEW = {"index_topk": 4}
"""Fewer positions than the case has tokens, or all would be chosen."""
SPARSE = {
    "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
    "index_block_size": 2,
    "index_topk_blocks": 3,
}
CONFIGS = {
    "deepseek_v32": FEW,
    "glm_moe_dsa": FEW,
    "deepseek_v4": {"index_topk": 2},
    "hy_v4": FEW,
    "hy_v4_vl_text": FEW,
    "qwen4_exp_text": {"indexer_budget": 8, "indexer_compress_ratio": 2},
    "dots3_note_text": FEW,
    "minimax_m3_vl_text": SPARSE,
    "glm5_next_text": {"index_topk": 8, "index_kpool": 2},
    "axk2": FEW,
    "mistral_large4_text": FEW,
}
"""The architectures with an indexer, each with a config in which it has to choose."""


def condition(context: Context) -> Verdict:
    """Needed if the submodel has indexers of its own."""
    count = INDEXERS.count(context)
    if not count:
        return NotNeeded("it has no sparse indexer")
    return Needed(f"autocast would round the scores of its {count} sparse indexers; without autocast nothing changes")


def _indexers(context: Context) -> Iterable[Target]:
    from hfpatch.patching.context import Target
    from hfpatch.patching.verifying.chosen import indexers

    if context.submodel is not None:
        own = dict(context.survey.own(context.submodel))
        yield from (Target(path, module) for path, module in indexers(own).items())


def symptom(trial: Trial) -> str | None:
    """Under autocast other positions are chosen, or scored otherwise, than in float32 for the same input."""
    from hfpatch.patching.verifying.chosen import choices

    found = choices(trial.model, trial.logits)
    rows, equal = sum(c.rows for c in found), sum(c.equal for c in found)
    error = max(c.error for c in found)
    if equal == rows and error < 1e-5:
        return None
    return f"{rows - equal} of {rows} rows choose other positions than in float32, scores are {error:.1e} away"


INDEXERS = select.Selection("sparse indexers", _indexers)

PATCH = Patch(
    title="Sparse indexers outside autocast, their scores in float32",
    architectures=tuple(CONFIGS),
    condition=condition,
    edits=(edits.outside_autocast(INDEXERS),),
    effect="equivalent",
    tolerance=2e-2,
    symptom=symptom,
    repros=tuple(
        Case(name, autocast=dtype, config=config, tokens=48)
        for name, config in CONFIGS.items()
        for dtype in ("bfloat16", "float16")
    ),
    leaves_alone=(Case("llama", autocast="bfloat16"), Case("deepseek_v3", autocast="bfloat16")),
)
