"""`hfpatch.check`: finds hazards in the combination of a model and its training arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from hfpatch.given import MAPPING, optional, want
from hfpatch.guarding.checking import forwards, joined, measured, packed, precision, rounding
from hfpatch.guarding.checking.adapting import adapters, dora, evaluated, gates, ties
from hfpatch.guarding.checking.hazard import Hazard, Hazards
from hfpatch.guarding.checking.measurement import Measurement
from hfpatch.guarding.checking.rehearsal import FORWARD
from hfpatch.guarding.checking.subject import Subject
from hfpatch.inspecting import facts

MAKE_NO_NAN = (
    "nothing-trains", "bf16-under-scaler", "no-bf16-here", "loss-not-divided", "checkpointing-cuts-off", "step-raises",
    "loss-like-a-guess", "no-gradient", "zero-gradient", "steps-lost", "accumulation-rounds", "buffers-cast",
    "full-eval-stays", "embedding-scale", "joined-too-large", "inplace-embedding", "adapter-cut-off",
    "adapter-half-frozen", "adapter-not-active", "adapter-stays-zero", "adapter-not-in-eval",
    "adapter-differs-in-eval", "adapter-changes-nothing", "documents-leak", "positions-offset",
    "tied-no-more",
)  # fmt: skip
"""Hazards that make no NaN, so the log hides nothing about them."""

KEPT = 0.99
"""Share of an adapter's update that a merge should keep."""

SHOWN = 5
"""Number of keys that a remark names."""


@torch.inference_mode(mode=False)
def check(
    model: nn.Module,
    args: Any = None,
    *,
    optimizer: Any = None,
    batch: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
) -> Hazards:
    """Check a model and its training arguments for hazards before training. Changes nothing, trains nothing.

        print(hfpatch.check(model, training_args))

    Args:
        model: The model as it is trained, with its adapters, wrapped or not. Of a model built on meta only the config
            is known.
        args: `TrainingArguments` or a subclass (TRL's SFTConfig), or a dict with such keys. For your own loop:
            `{"fp16": True}` for autocast with a GradScaler, `"gradient_accumulation_steps"`, and so on.
        optimizer: The optimizer, if it exists already; None for the one that `args` name.
        batch: A batch from the collator, on any device. With it a training step is run up to its gradients, and
            everything is put back: the loss, errors, gradients and the weights that a step would move are measured.
            It costs at most 3.5 training steps (a backward pass counts as two forward passes): one forward and
            backward pass, two more forward passes if the loss may not be divided, one more step for fresh adapters,
            two forward passes for adapters in evaluation, two for packed documents, and one step for each piece of
            advice that is tried. What is left out then is in `not_looked_at`. A batch is not
            used if one rank alone cannot run the model.
        device: The device of the training; None for the device of the model, or a GPU if the model is on the CPU.

    Returns:
        The hazards, and lists of the facts that were measured, read, and not looked at.

    Raises:
        InputError: A value in `args` does not fit its key; the model cannot be run on the batch; no such device.
        NotAModelError: `model` holds no torch module.
    """
    want("check", batch=(batch, optional(MAPPING)))
    subject = Subject(model, args, optimizer, batch, device)
    step = Measurement(subject, batch) if batch is not None and subject.alone is None and subject.loaded else None
    found = [
        *_nothing_trains(subject),
        *(dora.zero_rows(subject, step) if subject.loaded else ()),
        *([] if step is None else _of_the_step(step)),
        *precision.float16_parameters(subject),
        *precision.bfloat16_under_scaler(subject),
        *precision.eps_of_adam(subject),
        *precision.quantised_in_float16(subject),
        *precision.packed_for_cpu(subject),
        *precision.no_bfloat16(subject),
        *precision.left_padding(subject),
        *_loss_not_divided(subject, step),
        *([] if step is not None else _checkpointing(subject)),
        *ties.ties(subject),
        *rounding.buffers(subject),
        *rounding.evaluation(subject),
        *_clipping(subject),
    ]
    remarks = list(_remarks(subject))
    if subject.settings is not None and subject.settings.nan_filter:
        hides = "the Trainer's log shows 0.0, or the last good mean, for a loss that is NaN"
        if any(h.id not in MAKE_NO_NAN for h in found):
            change = "logging_nan_inf_filter=False, or callbacks=[hfpatch.GuardCallback()], which logs guard/loss_raw"
            reason = f"logging_nan_inf_filter is on, and a hazard above can end in NaN: {hides}"
            found.append(Hazard("nan-hidden-from-log", certain=False, reason=reason, change=change))
        else:
            remarks.append(f"logging_nan_inf_filter is on, as by default: {hides}; with False it shows the NaN")
    mixed = subject.settings.precision if subject.settings is not None else "no"
    name = type(subject.inner).__name__ + ("" if mixed == "no" else f", {mixed} mixed precision")
    return Hazards(
        name,
        tuple(found),
        tuple(remarks),
        measured=() if step is None else tuple(step.said),
        read=tuple(_read(subject, step)),
        not_looked_at=tuple(_not_looked_at(subject, step)),
    )


def _of_the_step(step: Measurement) -> Iterator[Hazard]:
    yield from measured.error(step)
    yield from measured.loss(step)
    gates.look(step)
    yield from adapters.halves(step)
    yield from measured.gradients(step)
    yield from joined.joins(step)
    yield from packed.documents(step)
    yield from evaluated.evaluation(step)
    yield from rounding.moved(step)
    yield from rounding.accumulation(step)


def _read(subject: Subject, step: Measurement | None) -> Iterator[str]:
    """What was read, not run."""
    yield "dtypes, quantisation, attention implementations"
    if subject.loaded:
        yield "buffers, against those that from_pretrained leaves"
        yield "whether heads and embeddings that the config ties share a weight"
        if dora.layers(subject):
            yield "the norms of rows by which DoRA divides"
        if any(adapter.merge is not None for adapter in facts.adapters(subject.survey)):
            yield "what a merge in half precision keeps of an adapter"
    if subject.settings is not None:
        yield "the training arguments"
    if subject.optimizer is not None or subject.settings is not None:
        yield "the optimizer's options"
    if subject.settings is not None and step is None:
        yield "the code of forward, for the division of the loss and for checkpointing"


def _not_looked_at(subject: Subject, step: Measurement | None) -> Iterator[str]:
    if subject.batch is None or step is None:
        why = "no batch=" if subject.batch is None else subject.alone or "built from a config, without weights"
        yield f"the first loss, errors in forward and backward, gradients, weights that a step moves: {why}"
    elif step.step.raised is not None:
        yield "the loss and the gradients: the step raised"
        yield from step.missed
    else:
        yield from measured.missing(step)
        yield from step.missed
    if subject.settings is None:
        yield "precision, accumulation, clipping, the log: no training arguments"
    elif subject.settings.ignored:
        more = ", ..." if len(subject.settings.ignored) > SHOWN else ""
        yield f"{', '.join(subject.settings.ignored[:SHOWN])}{more}: no keys of TrainingArguments"
    if subject.device is None:
        yield "what the card can do: no GPU here and no device named"


def _nothing_trains(subject: Subject) -> Iterator[Hazard]:
    if not subject.parameters:
        yield Hazard(
            "nothing-trains",
            certain=True,
            reason=f"no parameter of {type(subject.model).__name__} requires a gradient, so backward raises",
            change="add an adapter (hfpatch.lora_config), or call requires_grad_(True) on the parameters to train",
        )


def _loss_not_divided(subject: Subject, step: Measurement | None) -> Iterator[Hazard]:
    settings = subject.settings
    if step is not None and step.step.raised is not None:
        return
    batch = None if step is None else step.batch
    affords = step is None or step.affords(2 * FORWARD)
    times = 1 if settings is None or settings.smoothing else settings.accumulation * settings.processes
    found = forwards.undivided_loss(subject.inner, batch if affords else None) if times > 1 else None
    if step is not None and not affords and times > 1:
        step.missed.append("the loss with another num_items_in_batch: a check may cost 3.5 steps; the code was read")
    if settings is None or found is None:
        return
    ranks = f" on {settings.processes} processes" if settings.processes > 1 else ""
    yield Hazard(
        "loss-not-divided",
        certain=found.measured,
        reason=f"{type(subject.inner).__name__}.forward takes num_items_in_batch in its **kwargs, so the Trainer "
        f"leaves it to the model to divide the loss; but {found.reason}: with gradient_accumulation_steps="
        f"{settings.accumulation}{ranks}, loss and gradients are {times} times too large",
        change="accepts_loss_kwargs = False on the model or its class; or sum the loss over tokens and divide it by "
        "num_items_in_batch",
    )


def _checkpointing(subject: Subject) -> Iterator[Hazard]:
    from transformers import TrainingArguments

    known = {f.name for f in fields(TrainingArguments)}
    key = next(k for k in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs") if k in known)
    for cut in forwards.cut_stacks(subject.model, subject.inner, subject.settings):
        yield Hazard(
            "checkpointing-cuts-off",
            certain=False,
            reason=f"reentrant checkpointing begins at {cut.first}, and the input of that layer requires no gradient: "
            f"the {cut.tensors} trained parameters in these layers get no gradient, silently if a head trains as well",
            change=f"{key}={{'use_reentrant': False}} (not tried: no batch=)",
        )


def _clipping(subject: Subject) -> Iterator[Hazard]:
    if subject.settings is not None and subject.settings.clip == 0.0:
        yield Hazard(
            "clipping-off",
            certain=False,
            reason="max_grad_norm is 0 or None: nothing limits what one bad batch does to the weights",
            change="max_grad_norm=1.0; hfpatch.GuardCallback() skips such a batch altogether",
        )


def _remarks(subject: Subject) -> Iterator[str]:
    if not subject.loaded:
        yield (
            "built from a config: all parameters are taken as trained, in the dtype of the checkpoint; adapters, "
            "frozen parts and another dtype= are not known"
        )
    yield from subject.of_the_optimizer()
    for adapter in facts.adapters(subject.survey):
        if adapter.merge is not None and adapter.merge.kept < KEPT:
            yield (
                f"adapter {adapter.name!r} as it is now: {adapter.merge}; load the base in float32 to merge it, and "
                "save that in float32, or serve the adapter unmerged"
            )
    if subject.settings is not None and subject.device is not None and subject.device.type == "cpu" and subject.scaled:
        yield "on the CPU accelerate ignores fp16=True: it trains without autocast and without a GradScaler"
