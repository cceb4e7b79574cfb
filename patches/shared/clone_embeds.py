"""Hands out a copy of token embeddings that the model writes into, so that it trains behind frozen embeddings.

GIT, BLIP, UDOP and other models write into their token embeddings in place, which torch refuses once these require a
gradient: LoRA with gradient checkpointing raises. They write into a copy. By default: where a run shows it.

## What goes wrong
Gradient checkpointing with adapters needs embeddings that require a gradient; `enable_input_require_grads()` of PEFT,
of the Trainer and of transformers makes them so. Some models then write into them in place: they add positions, or put
image and sound features where their placeholders are. torch raises "a leaf Variable that requires grad is being used in
an in-place operation", or "a view of a leaf".

## What this changes
The output of such an embedding is a copy where gradients flow, which may be written into. Without gradients, in
evaluation and generation, nothing is copied.

## Numerics
exact: the copy has the same values. Cost: memory for one more tensor [batch, positions, width] in training.

## Known limits
Whether a model writes into its embeddings is seen in a run of a tiny model of its class and config. Code of your own
around it is not run: if it writes in place anywhere, the patch is offered by name for every token embedding.

## Sources
huggingface/transformers#40488 (an in-place write into inputs_embeds that require a gradient).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.patching import edits, select
from hfpatch.patching.language import Case, Needed, NotNeeded, Offered, Patch, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hfpatch.patching.context import Context, Target
    from hfpatch.patching.verifying.trial import Trial


def condition(context: Context) -> Verdict:
    """Needed if a tiny model like it writes into an embedding; offered if code of the user's own may."""
    from hfpatch.lab.written import writing_classes, written_embeddings

    found = written_embeddings(context.survey)
    if found.modules:
        more = f" and {len(found.modules) - 1} more" if len(found.modules) > 1 else ""
        return Needed(
            f"it writes in place into the output of {next(iter(found.modules))}{more} (seen in a tiny model of it), "
            "which torch refuses if that requires a gradient, as with adapters and gradient checkpointing"
        )
    if own := writing_classes(context.survey):
        return Offered(f"{own[0]} writes into tensors in place, into embeddings perhaps: not tried", suggested=False)
    if found.untried:
        path, why = next(iter(found.untried.items()))
        return Offered(f"whether {path or 'it'} writes into its embeddings is not known: {why}", suggested=False)
    return NotNeeded("it does not write into its embeddings in place")


def _embeddings(context: Context) -> Iterable[Target]:
    from hfpatch.lab.written import to_copy
    from hfpatch.patching.context import Target

    return (Target(path, module) for path, module in to_copy(context.survey).items())


def symptom(trial: Trial) -> str | None:
    """A forward raises once the embeddings require gradients."""
    from hfpatch.lab.written import raises_behind_frozen_embeddings

    return raises_behind_frozen_embeddings(trial.model)


PATCH = Patch(
    title="A copy of embeddings that the model writes into in place",
    architectures=("*",),
    whole=True,
    condition=condition,
    edits=(
        edits.copy_output(
            select.Selection("embeddings that are written into in place", _embeddings), "hand out a copy of embeddings"
        ),
    ),
    effect="exact",
    symptom=symptom,
    repros=(
        Case("git"),
        Case("blip"),
        Case("kosmos-2"),
        Case("udop"),
        Case("voxtral_realtime"),
        Case("ctrl"),
        Case("blt"),
        Case("git", inside="lora-all-linear"),
    ),
    leaves_alone=(Case("llama"), Case("gemma3"), Case("llama", inside="lora-all-linear"), Case("whisper")),
)
