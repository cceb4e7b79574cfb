"""Stable codes beside the messages, for scripts: they stay the same if the wording changes. A closed set.

    DECISIONS    `Decision.code`: why a patch is or is not applied
    ERRORS       `HfpatchError.code`: the kind of error
    HAZARDS      `Hazard.id`: what goes wrong in a model and its training arguments
    SKIPS        `Facts.code`: why a guard skipped a step

A finding of a trace has a `symptom`, a key of `hfpatch.symptoms.SYMPTOMS`; a finding of a scan has a `kind`.
"""

from __future__ import annotations

from typing import Literal, get_args

DecisionCode = Literal[
    "needed",
    "offered",
    "changes-the-function",
    "changed-since",
    "no-symptom-possible",
    "harmless",
    "already-applied",
    "excluded",
    "fixed-upstream",
    "refused-here",
    "not-served",
    "known-not-to-serve",
    "no-such-place",
    "property",
    "compiled",
    "not-cured",
    "foreign-code",
    "transformers-version",
    "another-package",
    "needs-another",
    "patch-raised",
    "replayed",
]

DECISIONS: dict[DecisionCode, str] = {
    "needed": "the fault can occur in this model, and the patch fixes it",
    "offered": "the patch can be applied here, but only by name",
    "changes-the-function": "the fault can occur, but the effect is one that is applied only by name",
    "changed-since": "applied before, and something else has been set since",
    "no-symptom-possible": "the fault cannot occur in this model",
    "harmless": "a run on a tiny model showed that the fault cannot occur there",
    "already-applied": "all edits of the patch are in place",
    "excluded": "left out by the caller",
    "fixed-upstream": "the installed transformers has the fix",
    "refused-here": "the fault may be present, but the patch cannot be applied to this model",
    "not-served": "no case proves the patch for this architecture, or for this stack",
    "known-not-to-serve": "the patch lists this architecture as unsupported",
    "no-such-place": "a module to be edited was not found",
    "property": "a module does not allow the edit: the attribute is a property of its class, or a weight is quantised",
    "compiled": "the model was compiled and called, and would ignore the edit",
    "not-cured": "a run on a tiny model showed that the patch does not cure the fault there",
    "foreign-code": "the patch relies on a forward that is not transformers' own, and no case runs it",
    "transformers-version": "written for other releases of transformers",
    "another-package": "it can be applied here, but comes from an installed package, so only by name",
    "needs-another": "another patch that this one needs is neither applied nor in force",
    "patch-raised": "the patch of an installed package cannot be imported, or its code raised an error",
    "replayed": "a manifest beside the checkpoint says so",
}
"""Code -> what it means."""

ERRORS: dict[str, str] = {
    "error": "hfpatch raised it",
    "bad-input": "an argument, a file or a config cannot be used",
    "not-a-model": "the object holds no torch module",
    "no-such-model": "no model of that name, directory or config",
    "unknown-patch": "no patch of that name",
    "no-embedding": "no token embedding, or several and none was named",
    "broken-patch-file": "a patch file cannot be loaded",
    "refused": "a patch that was requested by name cannot be applied to this model",
    "conflict": "two patches set different values in the same place",
    "stale-plan": "the model has changed since the plan was made",
    "not-applied": "an edit failed; the edits before it were undone",
    "not-reverted": "an edit cannot be undone",
    "guard-stop": "training cannot continue",
}
"""Code -> what it means."""

HAZARDS: dict[str, str] = {
    "step-raises": "a forward or backward pass on the batch raises",
    "inplace-embedding": "forward writes into an embedding's output, which a hook made require a gradient",
    "no-labels": "every label of the batch is -100",
    "loss-not-finite": "the first loss is NaN or infinite",
    "loss-like-a-guess": "a checkpoint's first loss is near ln(vocabulary)",
    "gradients-not-finite": "gradients are NaN or infinite although the loss is finite",
    "no-gradient": "trained parameters get no gradient",
    "zero-gradient": "trained parameters have a gradient of exactly 0",
    "adapter-cut-off": "lora_A gets no gradient while lora_B does",
    "adapter-changes-nothing": "a half of a LoRA adapter is 0 and it is not trained",
    "adapter-differs-in-eval": "evaluation computes something else with the adapter than training",
    "adapter-half-frozen": "one half of a LoRA adapter is not trained",
    "adapter-not-active": "a trained adapter is not active, so forward leaves it out",
    "adapter-not-in-eval": "adapted layers run in training and not in evaluation",
    "adapter-stays-zero": "a half of a LoRA adapter is 0 and cannot move",
    "dora-zero-rows": "DoRA divides by the norm of rows that are all zero",
    "embedding-scale": "token embeddings enter the language model in another size than its own",
    "joined-too-large": "what is joined to the token embeddings is many times as large",
    "tied-no-more": "a head and an embedding that the config ties train apart",
    "documents-leak": "packed documents read each other",
    "positions-offset": "position_ids begin elsewhere than the model's own positions",
    "steps-lost": "a step of the optimizer is rounded away in half precision",
    "accumulation-rounds": "gradients summed in half precision lose their small parts",
    "buffers-cast": "buffers that no checkpoint holds were cast to half precision",
    "full-eval-stays": "evaluation casts the model and does not cast it back",
    "nothing-trains": "no parameter requires a gradient",
    "fp16-parameters": "float16 parameters are trained",
    "bf16-under-scaler": "bfloat16 parameters under a GradScaler",
    "adam-eps-zero": "Adam's eps is 0 in the dtype of a parameter",
    "quantised-fp16": "quantised layers compute in float16",
    "packed-for-cpu": "an evaluation packed 4-bit weights for the CPU, and gradients through them are wrong",
    "no-bf16-here": "bfloat16 is requested, and the GPU does not support it",
    "left-padding-fp16": "left padding under eager attention in float16",
    "loss-not-divided": "the forward takes num_items_in_batch and does not divide by it",
    "checkpointing-cuts-off": "reentrant checkpointing begins where nothing requires a gradient",
    "clipping-off": "gradient clipping is off",
    "nan-hidden-from-log": "the Trainer's log hides a NaN loss",
}
"""Code -> what it means."""

SKIPS: dict[str, str] = {
    "no-labels": "the batch has no supervised token",
    "zero": "loss and gradients exactly 0",
    "loss": "the loss is not finite",
    "gradients": "a gradient is not finite",
    "explosion": "the gradient norm is above the limit",
    "spike": "the gradient norm is far above its running median",
    "overflow": "the loss scale is too high; the scaler lowers it",
    "collapsed": "gradients overflow although the loss scale is already low",
    "parameters": "a weight is not finite",
}
"""Code -> what it means."""

DECISION_CODES: tuple[str, ...] = get_args(DecisionCode)
