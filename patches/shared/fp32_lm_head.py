"""Computes the logits of a language model's head in float32.

A half-precision head rounds logits, so log-probabilities differ between generation and training (GRPO, DPO). They are a
float32 product, autocast off. By default: no.

## What goes wrong
A head in bfloat16 rounds each logit to 8 significant bits: a logit of 20 to a multiple of 1/8. Log-probabilities of
the same tokens then differ between two forwards that round differently, generate and a training step for example, and
methods that compare them (PPO, GRPO, DPO) see ratios other than 1 where the policy did not change. An upcast of the
logits comes too late, and autocast undoes an upcast of the operands.

## What this changes
The output layer multiplies float32 copies of its input and weight, outside autocast, and returns float32 logits. Soft
caps and scales come after it, and so does the loss, which transformers computes in float32 anyway. Adapters on the
head compute in float32 too. The weight stays as it is, tied or not.

## Numerics
equivalent: the same function, each logit exact to float32 for the input of the head. On 262,144 x 640 in bfloat16 the
largest error of a token's loss falls from 5e-2 to 3e-5. The layers below round as they did, and two forwards still
differ by that: on SmolLM2 135M (CPU) the mean log ratio of a token between generation and one forward falls from 0.039
to 0.033 only. Gradients are added up in float32.

Cost: the product runs at the speed of float32: with its backward pass 2.2 times stock on a CPU, and more on a GPU whose
tensor cores do not take part (torch.backends.cuda.matmul.allow_tf32 lets them; half-precision operands stay exact).
Memory: logits take 4 bytes and not 2, but their float32 copy in the loss is no copy any more; the weight is converted
16 MiB at a time, never as a whole: 56 MiB above stock at 64 tokens, none at 1,024 (`benchmarks/lm_head.py`).

## Known limits
Losses that multiply by the head's weight themselves (fused linear cross entropy) do not call the head: nothing changes
there. A quantised head is refused. No second derivatives. Under torch.compile the conversion is part of the graph.

## Sources
huggingface/trl#4303, allenai/open-instruct#1387, pytorch/torchtitan#3667, PrimeIntellect-ai/prime-rl#2438.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.dtypes import dtype_name
from hfpatch.patching import edits, select
from hfpatch.patching.language import Case, NotNeeded, Offered, Patch, Refused, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hfpatch.patching.context import Context, Target
    from hfpatch.patching.verifying.trial import Trial

COST = "the product then runs at float32's speed"
BITS = {"float16": 11, "bfloat16": 8}
EXACT = 1e-5
"""Largest relative L2 distance of the head's output from the exact product."""


def heads(context: Context) -> list[str]:
    """Return the paths of the submodel's output layers."""
    from hfpatch.inspecting.facts import heads as every

    home = context.submodel
    return [head.path for head in every(context.survey) if home is not None and head.submodel == home.path]


def condition(context: Context) -> Verdict:
    """Offered if the head is made of torch's linear layers."""
    from hfpatch.lora.linear import reads_weight

    found = heads(context)
    if not found:
        return NotNeeded("it has no output layer over a vocabulary")
    for path in found:
        parent, _, name = path.rpartition(".")
        if reads_weight(type(context.survey.modules[parent]), name):
            return Refused(f"{type(context.survey.modules[parent]).__name__} reads {name}.weight without calling it")
    if other := next(iter(_others(context)), ""):
        return Refused(f"{other}, not torch's linear layer with a floating-point weight")
    dtypes = {dtype_name(p.dtype) for target in _linear(context) for p in target.module.parameters(recurse=False)}
    narrow = next((dtype for dtype in BITS if dtype in dtypes), None)
    if narrow is None:
        return Offered("its head is float32: only autocast would round the logits", suggested=False)
    return Offered(f"its head rounds each logit to the {BITS[narrow]} bits of {narrow}; {COST}", suggested=False)


def _linear(context: Context) -> Iterable[Target]:
    from torch import nn

    from hfpatch.patching.context import Target

    for head in heads(context):
        for path, module in context.survey.below(head):
            if isinstance(module, nn.Linear) and _plain(module):
                yield Target(path, module)


def _others(context: Context) -> Iterable[str]:
    """Describe the modules of the heads that have a weight of another kind."""
    linear = {target.path for target in _linear(context)}
    for head in heads(context):
        for path, module in context.survey.below(head):
            if path not in linear and next(module.parameters(recurse=False), None) is not None:
                weight = getattr(module, "weight", None)
                yield f"{path} is a {type(module).__name__} of {dtype_name(getattr(weight, 'dtype', None))}"


def _plain(module: object) -> bool:
    weight = getattr(module, "weight", None)
    return weight is not None and weight.is_floating_point() and weight.element_size() >= 2


def symptom(trial: Trial) -> str | None:
    """What the head returns is not the product of what it is given, to float32's accuracy."""
    from hfpatch.patching.verifying.head_product import away_from_product

    away = away_from_product(trial)
    return f"logits are {away:.1e} away from the exact product" if away > EXACT else None


PATCH = Patch(
    title="The logits of a language model's head in float32",
    architectures=("*",),
    condition=condition,
    edits=(edits.in_float32(select.Selection("linear layers of the output head", _linear)),),
    effect="equivalent",
    tolerance=2e-2,
    symptom=symptom,
    repros=(
        Case("llama", "bfloat16"),
        Case("gemma2", "float16"),
        Case("qwen2", autocast="bfloat16"),
        Case("llama", "bfloat16", inside="speech-llm"),
    ),
    leaves_alone=(Case("llama"), Case("mixtral", "bfloat16")),
)
