"""Hazards that a rehearsed training step shows: its loss, its errors, its gradients, the weights a step would move."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from hfpatch.dtypes import dtype_name
from hfpatch.guarding.checking.hazard import Hazard
from hfpatch.guarding.checking.rehearsal import Raised, Rehearsal, rehearse, stream_into
from hfpatch.guarding.checking.subject import Subject
from hfpatch.inspecting import facts
from hfpatch.model.walk import starred, stock_class

HALF = (torch.float16, torch.bfloat16)
LIKE_CHANCE = 0.95
"""Of ln(vocabulary): a loss above it is that of a model which guesses."""
NAMED = 3
PARALLEL = 0.999
"""Cosine above which a vector counts as a multiple of a token's embedding."""
OTHER_SCALE = 1.5
LOUD = 30.0
"""Times the size of token embeddings at which what is joined to them drowns them."""


@dataclass(frozen=True)
class Measurement:
    """A rehearsed step of a subject, and what was measured by it, in words."""

    subject: Subject
    batch: Mapping[str, Any]
    said: list[str] = field(default_factory=list[str])

    @cached_property
    def step(self) -> Rehearsal:
        """The step as the arguments ask for it."""
        settings = self.subject.settings
        return self.run(reentrant=settings.reentrant if settings is not None and settings.checkpointing else None)

    @property
    def checkpointed(self) -> bool:
        """True if the arguments turn activation checkpointing on."""
        return self.subject.settings is not None and self.subject.settings.checkpointing

    @property
    def reentrant(self) -> bool:
        """True if layers are checkpointed by torch's reentrant implementation, by the arguments or already."""
        settings = self.subject.settings
        return self.subject.checkpoints_reentrant or (self.checkpointed and settings is not None and settings.reentrant)

    def run(self, *, reentrant: bool | None) -> Rehearsal:
        """Rehearse a step; with `reentrant` not None, under activation checkpointing of that kind."""
        subject = self.subject

        def prepare() -> None:
            if reentrant is not None:
                enable_checkpointing(subject, reentrant=reentrant)

        return rehearse(
            subject.inner,
            subject.parameters,
            self.batch,
            autocast=subject.autocast,
            reentrant=bool(reentrant) or subject.checkpoints_reentrant,
            prepare=prepare,
            watch=self.first_layers,
        )

    @cached_property
    def first_layers(self) -> dict[str, nn.Module]:
        """The first layer of each submodel's last stack, by the submodel's path."""
        return {path: stacks[-1].layers[0][1] for path, stacks in self.subject.survey.stacks.items()}


def enable_checkpointing(subject: Subject, *, reentrant: bool) -> None:
    """Turn activation checkpointing on as a Trainer does, by the name that this release of transformers has.

    In a hand-written model without such a method, that of each transformers model in it is called.
    """
    name = "activation_checkpointing_enable"
    asked: list[Any] = [subject.inner]
    if not hasattr(subject.inner, name) and not hasattr(subject.inner, "gradient_checkpointing_enable"):
        asked = [s.model for s in subject.survey.outermost_built if s.model.supports_gradient_checkpointing]
    for model in asked:
        (getattr(model, name, None) or model.gradient_checkpointing_enable)({"use_reentrant": reentrant})


def loss(found: Measurement) -> Iterator[Hazard]:
    """The first loss: not finite, without any label, or as high as a guess."""
    value, labels = found.step.loss, found.batch.get("labels")
    counted = int((labels != -100).sum()) if isinstance(labels, torch.Tensor) else None
    if counted == 0:
        yield Hazard(
            "no-labels",
            certain=True,
            reason="every label of this batch is -100: nothing is learned from it, and a mean over no token is NaN",
            change="look at the collator, the chat template and the truncation; hfpatch.Guard skips such batches",
        )
        return
    if value is None:
        return
    found.said.append(f"the first loss, {value:.4g}")
    if not math.isfinite(value):
        yield Hazard(
            "loss-not-finite",
            certain=True,
            reason=f"the loss of {type(found.subject.inner).__name__} on this batch is {value}",
            change="run the batch inside hfpatch.trace(model), which names the first operation that goes wrong",
        )
        return
    vocabulary = _vocabulary(found.subject)
    if vocabulary is None or not isinstance(labels, torch.Tensor) or not found.subject.from_checkpoint:
        return
    guess = math.log(vocabulary)
    if value > LIKE_CHANCE * guess:
        yield Hazard(
            "loss-like-a-guess",
            certain=False,
            reason=f"the loss on this batch is {value:.4g}, and a guess among {vocabulary:,} tokens gives {guess:.4g}; "
            "seen with a checkpoint that was not loaded whole, ids of another tokenizer, shifted labels",
            change="compare with the loss of the stock model on plain text; look at the loading report",
        )


def error(found: Measurement) -> Iterator[Hazard]:
    """The step raises."""
    raised = found.step.raised
    if raised is None:
        return
    place = f"{raised.path} ({raised.cls})" if raised.path else raised.cls
    held = ", ".join(f"{name} {what}" for name, what in list(raised.held.items())[:4])
    own = f", its weight {dtype_name(raised.weight)}" if raised.weight is not None else ""
    yield Hazard(
        "step-raises",
        certain=True,
        reason=f"a training step raises in {place}: {raised.error}" + (f"; there are {held}{own}" if held else ""),
        change=_remedy(found, raised),
    )


def _remedy(found: Measurement, raised: Raised) -> str:
    if found.checkpointed and (worked := _other_checkpointing(found)):
        return worked
    if "dtype" in raised.error.lower() or "scalar type" in raised.error.lower():
        return (
            f"cast what goes into {raised.path or raised.cls}"
            + (f" to {dtype_name(raised.weight)}" if raised.weight is not None else " to the dtype of its weights")
            + ", or train under autocast (bf16=True, fp16=True)"
        )
    return "mend the call; hfpatch.trace(model) around it shows what goes into each part"


def gradients(found: Measurement) -> Iterator[Hazard]:
    """Trained parameters that get no gradient, and gradients that are not finite."""
    step = found.step
    if step.raised is not None or step.loss is None or not step.gradients:
        return
    count = len(step.gradients)
    found.said.append(f"the gradients of {count} trained parameters")
    broken = [n for n, g in step.gradients.items() if g is not None and not bool(g.isfinite().all())]
    if broken and math.isfinite(step.loss):
        yield Hazard(
            "gradients-not-finite",
            certain=found.subject.autocast is not torch.float16,
            reason=f"{len(broken)} of {count} gradients are not finite although the loss is {step.loss:.4g}; nearest "
            f"the loss: {', '.join(broken[: -NAMED - 1 : -1])}",
            change="run the batch inside hfpatch.trace(model), which names the operation whose backward goes wrong",
        )
    dead = [n for n in step.gradients if (n in step.called or not step.backward) and without_gradient(step, n)]
    if dead and found.reentrant:
        other = found.run(reentrant=False)
        freed = [n for n in dead if step.gradients[n] is None and other.gradients.get(n) is not None]
        if freed:
            ends = "the loss has no graph, and backward raises" if not step.backward else "silently, while others do"
            yield Hazard(
                "checkpointing-cuts-off",
                certain=True,
                reason=f"under reentrant checkpointing {len(freed)} of {count} trained parameters, {freed[0]} first, "
                f"get no gradient: {ends}",
                change="gradient_checkpointing_kwargs={'use_reentrant': False} (tried on this batch: all of them get "
                "one)",
            )
            dead = [n for n in dead if n not in set(freed)]
    zero = [n for n in dead if step.gradients[n] is not None]
    dead = [n for n in dead if step.gradients[n] is None]
    if zero:
        yield Hazard(
            "zero-gradient",
            certain=False,
            reason=f"{len(zero)} of {count} trained parameters have a gradient of exactly 0 on this batch: "
            f"{_places(zero)}",
            change="nothing if a gate or a projector behind them starts at 0 and moves with the first step; else look "
            "whether their output is used",
        )
    if dead and not step.backward:
        yield Hazard(
            "no-gradient",
            certain=True,
            reason=f"the loss depends on none of the {count} trained parameters ({dead[0]} first), so backward raises",
            change="look for no_grad(), detach() or inference_mode() on the way, and for what forward leaves out",
        )
    elif dead:
        yield Hazard(
            "no-gradient",
            certain=False,
            reason=f"{len(dead)} of {count} trained parameters get no gradient on this batch although their modules "
            f"run: {_places(dead)}",
            change="freeze them or leave them out of the adapter's targets; DistributedDataParallel stops at them "
            "unless find_unused_parameters=True",
        )


def without_gradient(step: Rehearsal, name: str) -> bool:
    """True if a parameter has no gradient, or one that is exactly 0 for another reason than LoRA's B being 0."""
    gradient = step.gradients.get(name)
    if gradient is None:
        return True
    return "lora_A" not in name and "lora_embedding_A" not in name and not bool(gradient.any())


def missing(found: Measurement) -> Iterator[str]:
    """What the step could not show, and why."""
    step, subject = found.step, found.subject
    if step.loss is None:
        yield "the first loss and the gradients: the model gives no loss for this batch, which has no labels perhaps"
    idle = [n for n, g in step.gradients.items() if g is None and n not in step.called]
    if step.backward and idle:
        yield f"{len(idle)} trained parameters whose modules this batch does not reach: {_places(idle)}"
    if (
        step.backward
        and any(p.dtype in HALF for p in subject.parameters.values())
        and not any("weights that one step" in line for line in found.said)
    ):
        yield "the weights that a step moves: no optimizer given, or none of torch's own"


def joins(found: Measurement) -> Iterator[Hazard]:
    """Token embeddings that a hand-written model hands to its language model in another size than that gives them."""
    survey, ids = found.subject.survey, found.batch.get("input_ids")
    if isinstance(found.subject.inner, PreTrainedModel) and stock_class(found.subject.inner) is type(
        found.subject.inner
    ):
        return
    for path, stream in found.step.came_in.items():
        model = survey.modules[path]
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or bool((ids[0] < 0).any()):
            continue
        own = stream_into(model, found.first_layers[path], ids[:1])
        if own is None or own.shape[-1] != stream.shape[-1]:
            continue
        factor, others = _factor(stream, own)
        if factor is None:
            continue
        place = path or type(model).__name__
        found.said.append(f"the size of the token embeddings where they enter {place}, {factor:.3g} times its own")
        if not 1 / OTHER_SCALE < factor < OTHER_SCALE:
            scale = next((e.scale for e in facts.embeddings(survey) if e.submodel == path), None)
            twice = " (its own scale, applied twice)" if scale and math.isclose(factor, scale, rel_tol=0.02) else ""
            yield Hazard(
                "embedding-scale",
                certain=True,
                reason=f"token embeddings enter the first layer of {place} {factor:.3g} times as large as {place} "
                f"itself makes them from the same ids{twice}",
                change="pass the output of hfpatch.embed_tokens(model)(input_ids) unscaled: a model that scales its "
                "embeddings scales inputs_embeds too",
            )
        elif others is not None and others > LOUD:
            yield Hazard(
                "joined-too-large",
                certain=False,
                reason=f"the vectors beside them in the first row are {others:.3g} times as large (RMS) as the token "
                f"embeddings where they enter {place}",
                change="hfpatch.plan(model, only=['projection-init']) says what drawing the projector anew would do",
            )


def _factor(stream: torch.Tensor, table: torch.Tensor) -> tuple[float | None, float | None]:
    """Return by how much rows of a stream are multiples of rows of a table, and how large the other rows are.

    Args:
        stream: [positions, width].
        table: [tokens, width].

    Returns:
        The median factor over the rows that are such multiples, None if no row is; the RMS of the other rows over that
        of these, None without other rows.
    """
    cosine = functional.normalize(stream, dim=-1) @ functional.normalize(table, dim=-1).T
    best, which = cosine.max(dim=-1)
    same = best > PARALLEL
    if not bool(same.any()):
        return None, None
    factors = stream[same].norm(dim=-1) / table[which[same]].norm(dim=-1)
    rms = stream.square().mean(dim=-1).sqrt()
    others = float(rms[~same].median() / rms[same].median()) if not bool(same.all()) else None
    return float(factors.median()), others


def _other_checkpointing(found: Measurement) -> str:
    """Return advice under which the step runs, tried one after the other; empty if none does."""
    if found.reentrant:
        other = found.run(reentrant=False)
        if other.raised is None:
            return "gradient_checkpointing_kwargs={'use_reentrant': False} (tried on this batch: the step runs)"
    other = found.run(reentrant=None)
    if other.raised is None:
        return "leave gradient_checkpointing out for this model (tried on this batch: the step runs without it)"
    return ""


def _places(names: list[str]) -> str:
    kinds = dict.fromkeys(starred(n) for n in names)
    few = list(kinds)[:NAMED]
    return ", ".join(few) + (f", and {len(kinds) - NAMED} more kinds" if len(kinds) > NAMED else "")


def _vocabulary(subject: Subject) -> int | None:
    sizes = [e.vocabulary for e in facts.embeddings(subject.survey) if e.vocabulary]
    heads = facts.heads(subject.survey)
    return max(sizes) if sizes and heads else None
