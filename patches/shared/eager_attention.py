"""Switches a submodel to eager attention, if it needs it.

sdpa drops a soft-cap or sinks, or you want attention weights. Attention runs eagerly, which is less exact than sdpa in
bf16. By default: no.

## What goes wrong
torch's fused kernels cannot compute soft-capped logits or learned sinks. An implementation that is forced by
writing `config._attn_implementation` ignores them silently, or fails in its forward. Attention weights are returned
by eager attention only.

## What this changes
The submodel's attention implementation becomes `eager`, set by transformers' setter on a copy of the config, so that
another model with the same config object keeps its implementation.

## Numerics
equivalent, but *less* exact than sdpa in half precision: eager rounds each logit, sdpa keeps them in float32.
Relative error of its output in bfloat16 against float64: 3.5e-03 at logits of standard deviation 1, 1.6e-02 at 16,
8.0e-02 at 1024, 9.5e-01 with all logits near 3000. sdpa there: 2.0e-03, 1.4e-03, 2.0e-04, 1.8e-03
(`benchmarks/attention_error.py`, on a CPU).
It changes the function if the implementation in use ignores a soft-cap or sinks: back to the trained function.
Eager attention does not fix NaN.

## Known limits
Refused in float16: there a logit above 65,504 and a padded row become NaN; with sdpa and `fp32-attention-logits` they
do not. Memory grows with the square of the length. A submodel has one implementation: mixing would lose the mask.

## Sources
huggingface/transformers#32390 (a soft-cap that sdpa dropped); huggingface/transformers#17433.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.patching import edits, select
from hfpatch.patching.language import Case, Effect, NotNeeded, Offered, Patch, Refused, Verdict

if TYPE_CHECKING:
    from hfpatch.patching.context import Context, Target
    from hfpatch.patching.verifying.trial import Trial


def condition(context: Context) -> Verdict:
    """Suggested if the implementation in use ignores a soft-cap or sinks, or if attention weights are requested."""
    from hfpatch.model.attention import exists

    if not context.attentions or context.submodel is None:
        return NotNeeded("none of its own modules computes attention through transformers' AttentionInterface")
    now = context.attention
    if now == "eager":
        return NotNeeded("its attention is eager already")
    if not exists(now):
        return Offered(f"its attention is {now!r}, which transformers does not have: its forward fails")
    if now.startswith("hfpatch_"):
        return Refused(f"another patch chose its attention ({now}): revert that patch first")
    if context.dtype == "float16":
        return Refused(
            f"eager attention overflows in float16 (logits above 65,504, padded rows); keep {now}, or apply "
            "fp32-attention-logits"
        )
    lost = dropped(context)
    if lost:
        return Offered(f"{now} attention ignores its {lost}, which eager attention computes")
    if getattr(context.submodel.model.config, "output_attentions", False):
        return Offered(f"attention weights are requested, which {now} attention does not return")
    less = f"; in {context.dtype} it is less exact than sdpa" if context.dtype != "float32" else ""
    return Offered(f"nothing here needs eager attention, which uses more memory than {now}{less}", suggested=False)


def dropped(context: Context) -> str | None:
    """Return the part of the attention, soft-cap or sinks, that sdpa ignores if it is in use; None if nothing."""
    from hfpatch.model.attention import softcap

    if context.attention != "sdpa" or context.submodel is None:
        return None
    if any(a.sinks for a in context.attentions):
        return "sinks"
    return "soft-cap" if softcap(context.submodel.model.config) else None


def effect(context: Context, _target: Target) -> Effect:
    """Equivalent, unless the implementation in use ignores a soft-cap or sinks."""
    return "changes-function" if dropped(context) else "equivalent"


def symptom(trial: Trial) -> str | None:
    """Logits differ from those of eager attention."""
    error = trial.error(trial.logits())
    return f"relative error {error:.2g} to eager attention" if not error < 1e-3 else None


PATCH = Patch(
    title="Eager attention for a submodel that needs it",
    architectures=("*",),
    condition=condition,
    edits=(edits.choose_attention(select.submodel(), "eager", "compute attention eagerly"),),
    effect=effect,
    symptom=symptom,
    repros=(Case("gpt_oss", attention="sdpa"),),
    leaves_alone=(
        Case("llama", attention="sdpa"),
        Case("llama", dtype="bfloat16", attention="sdpa"),
        Case("gpt_oss", dtype="float16", attention="sdpa"),
        Case("gemma2"),
    ),
    tolerance=2e-2,
)
