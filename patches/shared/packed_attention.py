"""Keeps the documents of a packed row apart, which read each other in most models that train on them.

Documents packed into one row read each other, because transformers tells them apart only without a cache, and some
models never. Each gets its own masks. By default: no.

## What goes wrong
Packing puts several documents into one row, with positions that begin anew (`DataCollatorWithFlattening`, TRL's
`packing=True`). transformers reads the documents from these positions only where there is no cache and no mask, and
`use_cache` is on by default: a document then attends to those before it. Nothing fails, and the model is trained on
texts that do not belong together.

## What this changes
A call with such a row runs without a cache, and an attention mask of ones alone is left out, so that transformers makes
the masks for each document; a model that makes none from positions is passed those that `create_masks_for_generate`
makes. Rows of one document, padded rows, and calls that bring a cache, as in generation, stay as they are.

## Numerics
changes-function: the logits of packed documents become those of each document alone, up to rounding. All others stay.

## Known limits
Layers with a state (Mamba, RWKV, convolutions) carry it into the next document: refused, as are encoders and models
that count positions themselves. Rows that are packed and padded at once still leak. `flash_attention_2` reads the
documents itself.

## Sources
huggingface/transformers, masking_utils.py (`find_packed_sequence_indices`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.patching import edits, select
from hfpatch.patching.language import Case, NotNeeded, Offered, Patch, Refused, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hfpatch.patching.context import Context, Target
    from hfpatch.patching.verifying.trial import Trial


def condition(context: Context) -> Verdict:
    """Offered if a tiny model like it leaks, and does not with the change."""
    from hfpatch.lab.leaking import packed

    found = None if context.submodel is None else packed(context.survey, context.submodel)
    if found is None:
        return NotNeeded("it is no causal language model of transformers with its head, which packed rows are for")
    if found.why_not:
        return Refused(f"packed documents would not be kept apart: {found.why_not}")
    if not found.leaks:
        return NotNeeded("it keeps packed documents apart (seen in a tiny model of it)")
    return Offered(
        f"packed documents read each other here: logits are {found.leaks:.2g} of their size away from those of each "
        "document alone (in a tiny model of it); only packed rows change",
        suggested=False,
    )


def _models(context: Context) -> Iterable[Target]:
    from hfpatch.lab.leaking import packed
    from hfpatch.patching.context import Target

    if context.submodel is not None and (found := packed(context.survey, context.submodel)) is not None:
        yield Target(found.model, context.survey.modules[found.model])


def _masked(context: Context, _target: Target) -> bool:
    from hfpatch.lab.leaking import packed

    found = None if context.submodel is None else packed(context.survey, context.submodel)
    return found is not None and bool(found.masked)


def symptom(trial: Trial) -> str | None:
    """With another first document, the logits of the second move."""
    from hfpatch.lab.leaking import moved

    away = moved(trial.model)
    return f"with another first document, the logits of the second move by {away:.2g}" if away > 1e-4 else None


PATCH = Patch(
    title="Packed documents kept apart",
    architectures=("*",),
    condition=condition,
    edits=(
        edits.keep_documents(select.Selection("language models that are called with packed rows", _models), _masked),
    ),
    effect="changes-function",
    symptom=symptom,
    repros=(
        Case("llama"),
        Case("llama", attention="sdpa"),
        Case("gemma3_text"),
        Case("qwen3"),
        Case("gpt2"),
        Case("opt"),
        Case("opt", "bfloat16", attention="sdpa"),
        Case("mixtral", "bfloat16"),
        Case("llama", inside="lora-qv"),
    ),
    leaves_alone=(Case("mamba"), Case("roberta"), Case("t5"), Case("jamba"), Case("llama")),
    suggests="where it is refused: give each document a row of its own, padded",
)
