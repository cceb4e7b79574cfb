"""Computes attention logits in float32 if half precision cannot hold them.

Eager attention in float16: products above 65,504 and padded rows become NaN. Logits are computed in float32, autocast
off. By default: float16 eager.

## What goes wrong
Eager attention multiplies queries by keys in the dtype of the weights. In float16 a product above 65,504 is
inf and the loss NaN, although the scale applied next would bring it back into range; a mask's lowest
value plus a logit below -16 rounds to -inf, so a padded row is NaN and spreads to real tokens, even with a
soft-cap. In bfloat16 nothing overflows, but a logit of 300 is rounded to a multiple of 2.

## What this changes
The submodel's attention implementation becomes `hfpatch_fp32_logits`, set by transformers' setter on a copy of the
config. Product and softmax run in float32 with autocast off; an upcast after the product, or before it under autocast,
would have no effect. A fully masked row gives 0. Soft-caps, sinks, sliding windows, grouped heads and caches still
work. torch's fused attention is used if it supports the call, because it keeps its logits in float32: memory then
grows with the length and not with its square.

## Numerics
equivalent: the same function. `benchmarks/attention_error.py` compares outputs and gradients with float64 at
logits of standard deviation 1 to 1,024: on a CPU it is as accurate as sdpa's math backend.

## Known limits
With soft-caps, sinks and position biases the logits are computed explicitly: memory grows with the square of the
length, as in eager attention. Attention that does not use `AttentionInterface`, or whose eager function computes
something else (tested on a few tokens), is refused. On CUDA the fused half-precision kernels
run: their outputs are within 1.3 times the math backend's error, their gradients are not (1.2 to 22 times, growing
with the logits; the same as in stock sdpa). Models whose layers do not pass on `output_attentions` (GPT-2, OPT)
return no weights for more than 256 tokens or on CUDA; set `config.output_attentions` before the patch. In an integer
mask, nonzero means attend. Only offered if layers without attention (recurrent ones) carry padded rows on.

## Sources
huggingface/transformers#33317, huggingface/transformers#17433 (symptoms); MaxText's float32 query-key product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.patching import edits, select
from hfpatch.patching.kinds.attention_names import FP32_LOGITS, FP32_LOGITS_MASKED
from hfpatch.patching.language import Case, Needed, NotNeeded, Offered, Patch, Refused, Verdict

if TYPE_CHECKING:
    from hfpatch.patching.context import Context, Target
    from hfpatch.patching.verifying.trial import Trial

NAMES = (FP32_LOGITS, FP32_LOGITS_MASKED)

FAILING = {"*q_proj.bias": 120.0, "*k_proj.bias": -120.0}
"""Products of about -115,000, the same for each pair of tokens: beyond float16, and without effect on a softmax."""
PADDED = {"*q_proj.bias": 6.0, "*k_proj.bias": -6.0}
"""Logits of about -100: added to float16's lowest value they give -inf."""

WHAT = "logits above 65,504 and padded rows become NaN"


def condition(context: Context) -> Verdict:
    """Needed for eager attention in float16; otherwise offered."""
    from hfpatch.model.attention import exists, softcap
    from hfpatch.numerics.attention_functions import differs_from_eager

    if not context.attentions or context.submodel is None:
        return NotNeeded("none of its own modules computes attention through transformers' AttentionInterface")
    if context.attention.startswith("hfpatch_") and context.attention not in NAMES:
        return Refused(f"another patch chose its attention ({context.attention}): revert that patch first")
    cap = softcap(context.submodel.model.config)
    for attention in {a.eager: a for a in context.attentions}.values():
        difference = differs_from_eager(attention.eager, attention.module, cap)
        if difference:
            return Refused(f"{attention.path}: its eager attention {difference}, so it cannot be replaced")
    if not exists(context.attention):
        return Refused(f"its attention is {context.attention!r}, which transformers does not have; set another first")
    eager = context.attention in ("eager", *NAMES)
    if not eager:
        return Offered(f"{context.attention} attention already keeps its logits in float32", suggested=False)
    if context.dtype == "float16" and hybrid(context):
        return Offered(
            "eager attention in float16 gives NaN for large logits and padded rows; but layers without attention carry "
            "padded rows on to real tokens, and the patch sets these rows to 0"
        )
    if context.dtype == "float16":
        what = f"padded rows become NaN, despite its soft-cap of {cap:g}" if cap else WHAT
        return Needed(f"eager attention in float16: {what}")
    if context.dtype == "bfloat16":
        return Offered("eager attention in bfloat16 rounds each logit to 8 significant bits")
    return Offered(f"eager attention in {context.dtype} is exact; autocast to float16 would not be", suggested=False)


def hybrid(context: Context) -> bool:
    """True if some decoder layers have no attention: recurrent ones carry padded rows on to real tokens."""
    holders = [a.path for a in context.attentions]
    items = [path for stack in context.stacks for path, _ in stack.items]
    return not all(any(p.startswith(f"{path}.") for p in holders) for path in items)


def implementation(context: Context, _target: Target) -> str:
    """Return the variant without masks if every module is causal and the model class accepts sdpa, else the other."""
    from hfpatch.compat.implementation import taken

    causal = all(getattr(a.module, "is_causal", False) for a in context.attentions)
    takes = context.submodel is not None and "sdpa" in taken(type(context.submodel.model))
    return NAMES[0] if causal and takes else NAMES[1]


def symptom(trial: Trial) -> str | None:
    """Logits at real tokens are not finite, or farther from float32 than bfloat16's."""
    logits = trial.logits()
    bad = int((~logits.isfinite()).sum())
    if bad:
        return f"{bad} of {logits.numel()} logits at real tokens are not finite"
    error, bound = trial.error(logits), max(trial.error(trial.bfloat16), 0.01)
    return f"relative error {error:.2g}, bfloat16 weights {bound:.2g}" if error > bound else None


PATCH = Patch(
    title="Attention logits in float32 for eager half-precision attention",
    architectures=("*",),
    condition=condition,
    edits=(edits.choose_attention(select.submodel(), implementation, "compute attention logits in float32"),),
    effect="equivalent",
    symptom=symptom,
    repros=(
        Case("qwen2", dtype="float16", fill=FAILING),
        Case("qwen2", dtype="float16", fill=PADDED, padded=5),
        Case("qwen2", fill=FAILING, autocast="float16"),
    ),
    leaves_alone=(
        Case("qwen2", dtype="bfloat16"),
        Case("qwen2", dtype="float16", attention="sdpa"),
        Case("llama"),
    ),
    tolerance=5e-3,
    suggests="sdpa attention keeps logits in float32 as well, where the model takes it",
    answers=("attention-logits-overflow", "masked-row"),
)
