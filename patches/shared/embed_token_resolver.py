"""Gives an object that holds a language model a `get_input_embeddings` that works.

## What goes wrong
Code that needs the token embedding calls `get_input_embeddings()`. A hand-written multimodal module has no
such method; DDP, DataParallel and compiled DDP hide it; `CLIPModel` raises. So projects carry chains of
`model.model.model.embed_tokens` that break as soon as LoRA or a wrapper is added.

## What this changes
The object gets an instance attribute `get_input_embeddings` that asks `hfpatch.embed_tokens(model)` at
each call, so it stays right after PEFT, a resize or a change of wrapper. Class and state dict stay as they are.

## Numerics
exact: no output changes.

## Known limits
An object with two language models is refused: call `hfpatch.embed_tokens(model, submodel=...)` there. A
model without a token embedding (a vision tower) is refused too.

## Sources
huggingface/transformers#42542, hiyouga/LlamaFactory#8455, haotian-liu/LLaVA#1170 (symptom).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.patching import edits, select
from hfpatch.patching.language import Case, Needed, NotNeeded, Patch, Refused, Verdict

if TYPE_CHECKING:
    from torch import nn

    from hfpatch.patching.context import Context, Target
    from hfpatch.patching.verifying.trial import Trial


def condition(context: Context) -> Verdict:
    """Needed where the object's own method is missing or fails, and the resolver finds one embedding."""
    from hfpatch.errors import NoEmbeddingError
    from hfpatch.model.embed import resolve

    try:
        submodel, wanted = resolve(context.survey)
    except NoEmbeddingError as error:
        return Refused(str(error))
    got = own(context.survey.root)
    if got is wanted:
        return NotNeeded("get_input_embeddings() gives the token embedding already")
    return Needed(f"get_input_embeddings() gives none; the token embedding is that of {submodel.place}")


def own(model: nn.Module) -> object:
    """What the object's own `get_input_embeddings()` gives; None where it is missing or fails."""
    try:
        return model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    except (AttributeError, NotImplementedError, TypeError, RuntimeError, ValueError):
        return None


def symptom(trial: Trial) -> str | None:
    """No module that can be called with the case's token ids."""
    found = own(trial.model)
    if found is None:
        return f"{type(trial.model).__name__}.get_input_embeddings() is missing or fails"
    shape = tuple(found(trial.ids).shape)  # pyright: ignore[reportCallIssue, reportUnknownArgumentType]
    return None if len(shape) == 3 else f"embeddings of shape {shape}"


def _getter(_context: Context, target: Target) -> object:
    from hfpatch.model.embed import InputEmbeddings

    return InputEmbeddings(target.module)


PATCH = Patch(
    title="A get_input_embeddings that works for objects that hold a language model",
    architectures=("*",),
    whole=True,
    condition=condition,
    edits=(
        edits.set_attribute(select.root(), "get_input_embeddings", _getter, "set a get_input_embeddings that resolves"),
    ),
    effect="exact",
    symptom=symptom,
    repros=(
        Case("gemma3_text", inside="speech-llm"),
        Case("llama", inside="speech-llm"),
    ),
    leaves_alone=(Case("llama"), Case("gemma3")),
)
