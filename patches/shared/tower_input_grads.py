"""Lets gradients reach adapters in a tower whose layers reentrant checkpointing cuts off.

Reentrant checkpointing cuts off adapters in an image or sound tower: no gradient, silently. What comes into the tower's
layers requires a gradient. By default: where an adapter is.

## What goes wrong
A reentrant checkpoint passes gradients on only if what it is called with requires one. PEFT and the Trainer make token
embeddings require gradients, and not what comes into the layers of an image or sound tower. With everything before
these layers frozen, adapters in them get no gradient, silently, while those of the language model train.

## What this changes
The output of the module before a tower's layers requires a gradient in training, if it does not already. Nothing else
begins a gradient: no parameter more is trained.

## Numerics
exact: the forward pass computes the same values, and gradients are those without checkpointing. Cost: memory for one
more tensor, and the backward pass through the layers before the first adapter.

## Known limits
Which layers are cut off is seen in runs of a tiny model of the class and config of each transformers model inside.
Layers that are called with keywords alone get nothing from a reentrant checkpoint; the patch is refused there.
`gradient_checkpointing_kwargs={"use_reentrant": False}` does without the patch, and is torch's own advice.

## Sources
pytorch, torch/utils/checkpoint.py ("None of the inputs have requires_grad=True. Gradients will be None").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.patching import edits, select
from hfpatch.patching.language import Case, Needed, NotNeeded, Offered, Patch, Refused, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hfpatch.patching.context import Context, Target
    from hfpatch.patching.verifying.trial import Trial


def condition(context: Context) -> Verdict:
    """Needed if an adapter, or another part that trains, is in layers that are cut off."""
    from hfpatch.lab.cut_off import cut_off, trained_behind

    found = cut_off(context.survey)
    cut = trained_behind(context.survey)
    parts = ", ".join(f"{count} trained parameters in {start.layers}" for start, count in cut.items())
    cuts = f"under reentrant checkpointing {parts} would get no gradient"
    if lost := [start for start in cut if start.why_not]:
        return Refused(f"{cuts}; {lost[0].layers} cannot be helped: {lost[0].why_not}")
    if cut:
        return Needed(cuts)
    mended = [start.layers for start in found.starts if not start.why_not]
    if mended and not any(p.requires_grad for p in context.survey.root.parameters()):
        why = f"reentrant checkpointing would cut off adapters in {mended[0]}; nothing trains now"
        return Offered(why, suggested=False)
    if found.starts:
        return NotNeeded(f"no adapter is in {found.starts[0].layers}, or what comes into these layers trains too")
    if found.untried:
        path, why = next(iter(found.untried.items()))
        return Refused(f"whether reentrant checkpointing cuts off layers of {path or 'it'} is not known: {why}")
    return NotNeeded("reentrant checkpointing cuts off none of its layers")


def _starts(context: Context) -> Iterable[Target]:
    """The modules before the layers that something trains in; before all of them if nothing trains."""
    from hfpatch.lab.cut_off import cut_off, trained_behind
    from hfpatch.patching.context import Target

    cut = trained_behind(context.survey) or cut_off(context.survey).starts
    return (Target(s.feeders[0], context.survey.modules[s.feeders[0]]) for s in cut if not s.why_not)


def symptom(trial: Trial) -> str | None:
    """Adapters that get a gradient without checkpointing get none with it."""
    from hfpatch.lab.cut_off import lost_to_checkpointing

    lost = lost_to_checkpointing(trial.model)
    return f"{len(lost)} trained parameters get no gradient, {lost[0]} first" if lost else None


PATCH = Patch(
    title="Gradients for adapters in a tower under reentrant checkpointing",
    architectures=("*",),
    whole=True,
    condition=condition,
    edits=(
        edits.copy_output(
            select.Selection("modules before the layers of a tower", _starts),
            "let gradients flow from the output on",
            begins=True,
        ),
    ),
    effect="exact",
    symptom=symptom,
    repros=tuple(
        Case(name, inside="lora-towers")
        for name in ("qwen3_vl", "gemma4", "glm4v", "idefics", "glmasr", "nemotron_h_omni", "fun_asr_nano", "ovis2")
    ),
    leaves_alone=(
        Case("llama", inside="lora-towers"),
        Case("llava", inside="lora-towers"),
        Case("qwen3_vl", inside="lora-all"),
        Case("qwen3_vl"),
    ),
)
