"""The codes that stand beside sentences: words that do not change when a sentence does, for scripts. A closed set.

    DECISIONS    `Decision.code`: why a patch is or is not applied
    ERRORS       `HfpatchError.code`: which kind of error
    HAZARDS      `Hazard.id`: what goes wrong in a model and its training arguments
    SKIPS        `Facts.code`: why a guard skipped a step

What a tracer finds has a `symptom`, of `hfpatch.symptoms.SYMPTOMS`; what a scan finds a `kind`.
"""

from __future__ import annotations

from typing import Literal, get_args

DecisionCode = Literal[
    "needed",
    "offered",
    "changes-the-function",
    "changed-since",
    "no-symptom-possible",
    "already-applied",
    "excluded",
    "fixed-upstream",
    "refused-here",
    "not-served",
    "known-not-to-serve",
    "no-such-place",
    "property",
    "compiled",
    "changed-upstream",
    "transformers-version",
]

DECISIONS: dict[DecisionCode, str] = {
    "needed": "the fault can happen here, and the patch mends it",
    "offered": "the patch can be run here, but by name only",
    "changes-the-function": "the fault can happen here; the effect is one that nobody gets unasked",
    "changed-since": "applied before, and somebody has set something else since",
    "no-symptom-possible": "the fault cannot happen here",
    "already-applied": "everything of it is in force",
    "excluded": "left out by the caller",
    "fixed-upstream": "the installed transformers has the fix",
    "refused-here": "the fault may be there, but the patch does not go with this model",
    "not-served": "no case proves the patch for this architecture, or for this stack",
    "known-not-to-serve": "an architecture that the patch names as one it does not serve",
    "no-such-place": "the module that it edits was not found",
    "property": "what it would set is a property of the module's class",
    "compiled": "the model was compiled and called, and would not see the edit",
    "changed-upstream": "a body of another package that it leans on is not the one it was proved against",
    "transformers-version": "written for other releases of transformers",
}
"""Code -> what it means."""

ERRORS: dict[str, str] = {
    "error": "hfpatch raised it",
    "bad-input": "what the caller named cannot be used",
    "not-a-model": "the object holds no torch module",
    "no-such-model": "no model under that name, directory or config",
    "unknown-patch": "no patch of that name",
    "no-embedding": "no token embedding, or more than one to choose from",
    "broken-patch-file": "a patch file cannot be loaded",
    "refused": "a patch that was asked for by name does not go with this model",
    "conflict": "two patches want different things of the same place",
    "stale-plan": "the model is not as it was when the plan was made",
    "not-applied": "an edit failed; those before it were undone",
    "not-reverted": "something stands in the way of an undo",
    "guard-stop": "training cannot go on as it is",
}
"""Code -> what it means."""

HAZARDS: dict[str, str] = {
    "step-raises": "a forward or backward pass on the batch raises",
    "no-labels": "every label of the batch is -100",
    "loss-not-finite": "the first loss is NaN or infinite",
    "loss-like-a-guess": "a checkpoint's first loss is near ln(vocabulary)",
    "gradients-not-finite": "gradients are NaN or infinite although the loss is finite",
    "no-gradient": "trained parameters get no gradient",
    "zero-gradient": "trained parameters have a gradient of exactly 0",
    "embedding-scale": "token embeddings enter the language model in another size than its own",
    "joined-too-large": "what is joined to the token embeddings is many times as large",
    "steps-lost": "a step of the optimizer is rounded away in half precision",
    "accumulation-rounds": "gradients summed in half precision lose their small parts",
    "buffers-cast": "buffers that no checkpoint holds were cast to half precision",
    "full-eval-stays": "evaluation casts the model and does not cast it back",
    "nothing-trains": "no parameter requires a gradient",
    "fp16-parameters": "float16 parameters train",
    "bf16-under-scaler": "bfloat16 parameters under a GradScaler",
    "adam-eps-zero": "Adam's eps is 0 in the dtype of a parameter",
    "quantised-fp16": "quantised layers compute in float16",
    "no-bf16-here": "bfloat16 is asked for and the card has none",
    "left-padding-fp16": "left padding under eager attention in float16",
    "loss-not-divided": "the forward takes num_items_in_batch and does not divide by it",
    "checkpointing-cuts-off": "reentrant checkpointing begins where nothing requires a gradient",
    "clipping-off": "nothing limits what one batch does",
    "nan-hidden-from-log": "the Trainer's log hides a NaN loss",
}
"""Code -> what it means."""

SKIPS: dict[str, str] = {
    "no-labels": "no supervised token",
    "zero": "loss and gradients exactly 0",
    "loss": "the loss is not finite",
    "gradients": "a gradient is not finite",
    "explosion": "the gradient norm is over the limit",
    "spike": "the gradient norm is far over its running median",
    "overflow": "the loss scale is too high; it falls by itself",
    "collapsed": "gradients overflow at a loss scale that is low already",
    "parameters": "a weight is not finite",
}
"""Code -> what it means."""

DECISION_CODES: tuple[str, ...] = get_args(DecisionCode)
