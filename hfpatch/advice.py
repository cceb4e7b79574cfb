"""Matches the findings of a trace with the patches that fix them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

from hfpatch.given import FLAG, FUNCTION, TEXT, optional, want
from hfpatch.model.walk import inside
from hfpatch.patching import registry
from hfpatch.patching.apply import plan
from hfpatch.patching.decision import Decision
from hfpatch.tracing.finding import Finding
from hfpatch.tracing.trace import Trace


def trace(
    model: object,
    *,
    steps: Collection[int] | Callable[[int], bool] | None = None,
    epochs: Collection[int] | Callable[[int], bool] | None = None,
    ranks: Collection[int] | None = None,
    backward: bool = True,
    level: Literal["blocks", "modules"] = "modules",
    progress: Callable[[str], None] | None = None,
) -> Trace:
    """Trace a model, and name the first operation that goes wrong, forward or backward.

        with hfpatch.trace(model, steps=[0, 100], ranks=[0]) as t:
            train()
        print(t.report())          # t.first_bad, t.headroom("float16"), t.to_html("trace.html")

    A step is one call of `model` and the backward pass that follows. The trace also works as a decorator. The model is
    not changed. In steps that were not chosen only the calls of the model are counted; after the last listed step all
    hooks are removed. In a traced step the arguments and gradients of the blocks are kept until the step is over, and
    on a GPU the statistics are read with one synchronisation. If a tensor is not finite, the block that produced it is
    run again and its operations are watched. Each rank traces its own part of the model. The statistics of every
    traced step are kept, about 1 kB per tensor: in a long run, choose steps.

    Args:
        model: A model, wrapped or not, or an object whose `.model` is one. A compiled model runs uncompiled while it is
            traced, and so does every other compiled model in the process (`torch.compiler.set_stance`).
        steps: Which calls of the model to trace, counted from 0, or a function that returns True for them; None for
            all.
        epochs: Which entries of the context (or calls of the decorated function) to trace; if given, steps are counted
            from the start of each entry.
        ranks: Ranks of a distributed run on which to trace; None for all.
        backward: Trace the gradients too.
        level: `modules` measures inputs and outputs of every module; `blocks` only those of layers and of the parts
            beside them, which costs less and finds the same operation unless the bad value never leaves its block.
        progress: Called with the path of each block when its forward or backward pass is done.

    Raises:
        NotAModelError: The object holds no torch module.
        InputError: An option cannot be used.
    """
    want("trace", level=(level, TEXT), backward=(backward, FLAG), progress=(progress, optional(FUNCTION)))
    return Trace(
        model,
        steps=steps,
        epochs=epochs,
        ranks=ranks,
        backward=backward,
        level=level,
        answers=lambda finding: advice(finding, model),
        progress=progress,
    )


def advice(finding: Finding, model: object) -> tuple[str, ...]:
    """Return what to try for a finding: the call that applies the patches that fix it, or why there is none.

    Args:
        finding: What the tracer found.
        model: The model it was found in.
    """
    if finding.ordinary:
        return ("No patch is needed: a GradScaler skips this step and halves its scale; keep a guard on the run.",)
    decisions = _decisions(finding, model)
    if runnable := _runnable(decisions):
        return (f"try: hfpatch.apply(model, only={list(runnable)})",)
    of_its_kind = [d for d in decisions if d.vital is not None] or decisions[:1]  # others are for other architectures
    return (*map(_unhelpful, of_its_kind), _unpatched(finding, "other patch" if decisions else "patch"))


def answering(finding: Finding, model: object) -> tuple[str, ...]:
    """Return the ids of the patches that fix a finding and can be applied to this model; empty if none is needed.

    Args:
        finding: What the tracer found.
        model: The model it was found in.
    """
    return () if finding.ordinary else _runnable(_decisions(finding, model))


def _decisions(finding: Finding, model: object) -> list[Decision]:
    """Return the decisions, for this model, on the patches that fix a finding."""
    entries = registry.entries()
    ids = {name for name, entry in entries.items() if finding.symptom in entry.patch.answers}
    here = {name for name, entry in entries.items() if finding.symptom in entry.patch.answers_where_it_edits}
    if not ids | here:
        return []
    decisions = plan(model, exclude=entries.keys() - (ids | here)).decisions
    return [d for d in decisions if d.patch in ids or (d.patch in here and _edits(d, finding.module))]


def _edits(decision: Decision, module: str) -> bool:
    return any(edit.change.widens and inside(module, edit.path) for edit in decision.edits)


def _runnable(decisions: list[Decision]) -> tuple[str, ...]:
    return tuple(sorted({d.patch for d in decisions if d.decided in ("applied", "opt-in")}))


def _unhelpful(decision: Decision) -> str:
    """Return why a patch that fixes a finding cannot be applied, and what its file suggests instead."""
    instead = registry.get(decision.patch).patch.suggests if decision.decided == "refused" else ""
    why = f"{decision.patch} fixes this, but is {decision.decided} here: {decision.reason}"
    return f"{why}; {instead}" if instead else why


def _unpatched(finding: Finding, what: str) -> str:
    hints = {
        "bad-input": "check the data loader and collator that made the batch",
        "bad-weight": "check the checkpoint with `hfpatch scan`, or the optimizer step that wrote the weight",
        "bad-buffer": "check the code that moved or cast the model",
        "uninitialised-buffer": "load the model with from_pretrained, or call the module's own initialisation",
        "no-labels": "skip the optimizer step for such a batch, as hfpatch.Guard does",
    }
    hint = hints.get(finding.symptom)
    return f"No {what} is known for this" + (f"; {hint}." if hint else ".")
