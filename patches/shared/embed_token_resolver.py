"""Adds a working `get_input_embeddings` to an object that holds a language model.

Your object holds a language model and has no working `get_input_embeddings`. It gets one. By default: yes.

## What goes wrong
Code that needs the token embedding calls `get_input_embeddings()`. A hand-written multimodal module has no
such method; DDP, DataParallel and compiled DDP hide it; `CLIPModel` raises. Projects therefore use chains such as
`model.model.model.embed_tokens`, which break as soon as LoRA or a wrapper is added.

## What this changes
The object gets an instance attribute `get_input_embeddings` that calls `hfpatch.embed_tokens(model)` each time, so
it remains correct after PEFT, a resize or a change of wrapper. Class and state dict stay as they are.

## Numerics
exact: no output changes.

## Known limits
An object with two language models is refused: call `hfpatch.embed_tokens(model, submodel=...)` instead. A
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
    """Needed if the object's own method does not return the one token embedding that `embed_tokens` finds."""
    from hfpatch.errors import NoEmbeddingError
    from hfpatch.model.embed import resolve

    try:
        submodel, wanted = resolve(context.survey)
    except NoEmbeddingError as error:
        return Refused(str(error))
    got = own(context.survey.root)
    if got is wanted:
        return NotNeeded("get_input_embeddings() already returns the token embedding")
    return Needed(f"get_input_embeddings() does not return the token embedding, which is in {submodel.place}")


def own(model: nn.Module) -> object:
    """Return the result of the object's own `get_input_embeddings()`; None if it is missing or fails."""
    try:
        return model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    except (AttributeError, NotImplementedError, TypeError, RuntimeError, ValueError):
        return None


def symptom(trial: Trial) -> str | None:
    """`get_input_embeddings()` is missing, fails, or returns a module that does not embed the case's token ids."""
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
