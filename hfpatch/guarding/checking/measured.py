"""Hazards that a rehearsed training step shows: its loss, its errors, its gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from hfpatch.dtypes import dtype_name
from hfpatch.guarding.checking import tried
from hfpatch.guarding.checking.adapting.gates import without_gradient
from hfpatch.guarding.checking.hazard import Hazard
from hfpatch.guarding.checking.measurement import NAMED, Measurement, places
from hfpatch.guarding.checking.raised import Raised, Written
from hfpatch.guarding.checking.rehearsal import Rehearsal
from hfpatch.guarding.checking.subject import Subject
from hfpatch.inspecting import facts

HALF = (torch.float16, torch.bfloat16)
LIKE_CHANCE = 0.95
"""Of ln(vocabulary): a loss above it is that of a model which guesses."""


def loss(found: Measurement) -> Iterator[Hazard]:
    """The first loss: not finite, without any label, or as high as a guess."""
    value, labels = found.step.loss, found.batch.get("labels")
    counted = int((labels != -100).sum()) if isinstance(labels, torch.Tensor) else None
    if counted == 0 and isinstance(labels, torch.Tensor):
        what = "every label of this batch is -100" if labels.numel() else "this batch holds no label"
        yield Hazard(
            "no-labels",
            certain=True,
            reason=f"{what}: nothing is learned from it, and a mean over no token is NaN",
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
        if changed := found.step.changed:
            found.said.append(f"that forward writes into {len(changed)} parameters itself, {changed[0]} first")
        if found.step.written:
            found.said.append(f"that forward writes in place into the output of {', '.join(found.step.written)}")
        return
    place = f"{raised.path} ({raised.cls})" if raised.path else raised.cls
    if raised.written is not None and raised.written.embedding:
        yield _in_place(found, place, raised.written)
        return
    held = ", ".join(f"{name} {what}" for name, what in list(raised.held.items())[:4])
    own = f", its weight {dtype_name(raised.weight)}" if raised.weight is not None else ""
    yield Hazard(
        "step-raises",
        certain=True,
        reason=f"a training step raises in {place}: {raised.error}" + (f"; there are {held}{own}" if held else ""),
        change=_remedy(found, raised),
    )


def _in_place(found: Measurement, place: str, written: Written) -> Hazard:
    return Hazard(
        "inplace-embedding",
        certain=True,
        reason=f"{place} writes into {written.tensor}, the output of {written.embedding}, in place ({written.line}), "
        "and that is a leaf that requires a gradient, as enable_input_require_grads() makes it: torch refuses, and a "
        "training step raises",
        change=tried.instead_of_raising(found) or f"write into a copy ({written.tensor}.clone())",
    )


def _remedy(found: Measurement, raised: Raised) -> str:
    if worked := tried.instead_of_raising(found):
        return worked
    told = raised.weight is not None and any(w.startswith(dtype_name(raised.weight)) for w in raised.held.values())
    if not told and ("dtype" in raised.error.lower() or "scalar type" in raised.error.lower()):
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
    ran = [n for n in step.gradients if n in step.called or not step.backward]
    dead = [n for n in ran if n not in found.judged and without_gradient(step, n)]
    if dead and found.reentrant and (cut := tried.instead_of_cutting_off(found, dead)):
        ends = "the loss has no graph, and backward raises" if not step.backward else "silently, while others do"
        yield Hazard(
            "checkpointing-cuts-off",
            certain=True,
            reason=f"under reentrant checkpointing {len(cut.freed)} of {count} trained parameters, {cut.freed[0]} "
            f"first, get no gradient: {ends}",
            change=cut.change,
        )
        dead = [n for n in dead if n not in set(cut.freed)]
    yield from _dead(step, dead)


def _dead(step: Rehearsal, names: list[str]) -> Iterator[Hazard]:
    count = len(step.gradients)
    zero = [n for n in names if step.gradients[n] is not None]
    dead = [n for n in names if step.gradients[n] is None]
    if zero:
        yield Hazard(
            "zero-gradient",
            certain=False,
            reason=f"{len(zero)} of {count} trained parameters have a gradient of exactly 0 on this batch: "
            f"{places(zero)}",
            change="look whether their output is used, and whether it is multiplied by a frozen 0; nothing if "
            "other batches reach them (experts, rare tokens)",
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
            f"run: {places(dead)}",
            change="freeze them or leave them out of the adapter's targets; DistributedDataParallel stops at them "
            "unless find_unused_parameters=True",
        )


def missing(found: Measurement) -> Iterator[str]:
    """What the step could not show, and why."""
    step, subject = found.step, found.subject
    if step.loss is None:
        yield "the first loss and the gradients: the model gives no loss for this batch, which has no labels perhaps"
    idle = [n for n, g in step.gradients.items() if g is None and n not in step.called and n not in found.judged]
    if step.backward and idle:
        yield f"{len(idle)} trained parameters whose modules this batch does not reach: {places(idle)}"
    if (
        step.backward
        and any(p.dtype in HALF for p in subject.parameters.values())
        and not any("weights that one step" in line for line in found.said)
    ):
        yield "the weights that a step moves: no optimizer given, or none of torch's own"


def _vocabulary(subject: Subject) -> int | None:
    sizes = [e.vocabulary for e in facts.embeddings(subject.survey) if e.vocabulary]
    heads = facts.heads(subject.survey)
    return max(sizes) if sizes and heads else None
