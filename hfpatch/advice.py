"""Joins what a tracer finds to the patches that answer it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

from hfpatch.given import FLAG, FUNCTION, TEXT, optional, want
from hfpatch.patching import registry
from hfpatch.patching.decision import Decision
from hfpatch.patching.kinds.compute_in_float32 import ComputeInFloat32
from hfpatch.patching.plan import plan
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
    """Watch a model, and name the first operation that goes wrong, forward or backward.

        with hfpatch.trace(model, steps=[0, 100], ranks=[0]) as t:
            train()
        print(t.report())          # t.first_bad, t.headroom("float16"), t.to_html("trace.html")

    A step is one call of `model` and the backward pass that follows. It is also a decorator. Nothing of the model is
    changed, and nothing is installed in steps that were not chosen but a count of calls; after the last chosen step
    that goes too. In a traced step the arguments and gradients of the blocks are kept until the step is over, and on a
    GPU the statistics are read with one synchronisation. Where something is not finite, the block it came from is run
    again, and its operations watched. Several ranks each trace their own part. Figures of every traced step are
    kept, about 1 kB a tensor: over a long run, choose steps.

    Args:
        model: A model, however wrapped, or an object whose `.model` is one. A compiled one runs uncompiled while it is
            traced (with `torch.compiler.set_stance`, so others in the process do too).
        steps: Which calls of the model to trace, counted from 0, or a function that says so; None for all.
        epochs: Which entries of the context (or calls of the decorated function) to trace; with it, steps are counted
            from the start of each entry.
        ranks: Ranks of a distributed run on which to trace; None for all.
        backward: Follow the gradients too.
        level: `modules` measures what goes into and comes out of every module, `blocks` of layers and the parts beside
            them only, which costs less and finds the same operation unless what went wrong does not leave its block.
        progress: Told the path of each block as it is passed.

    Raises:
        NotAModelError: The object holds no torch module.
        InputError: Another option cannot be used.
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
        passed=progress,
    )


def advice(finding: Finding, model: object) -> tuple[str, ...]:
    """What to try about a finding: the line that runs the patches that answer it, or why there is none.

    Args:
        finding: What the tracer found.
        model: The model it was found in.
    """
    if finding.ordinary:
        return ("No patch is needed: a GradScaler skips this step and halves its scale; keep a guard on the run.",)
    decisions = _decisions(finding, model)
    if runnable := _runnable(decisions):
        return (f"try: hfpatch.apply(model, only={list(runnable)})",)
    return (*(_unhelpful(d) for d in decisions), _unpatched(finding, "other patch" if decisions else "patch"))


def answering(finding: Finding, model: object) -> tuple[str, ...]:
    """Ids of the patches that answer a finding and can be applied to this model; empty if none is needed.

    Args:
        finding: What the tracer found.
        model: The model it was found in.
    """
    return () if finding.ordinary else _runnable(_decisions(finding, model))


def _decisions(finding: Finding, model: object) -> list[Decision]:
    """What the patches that answer a finding would do to a model."""
    entries = registry.entries()
    ids = {name for name, entry in entries.items() if finding.symptom in entry.patch.answers}
    here = {name for name, entry in entries.items() if finding.symptom in entry.patch.answers_where_it_edits}
    if not ids | here:
        return []
    decisions = plan(model, exclude=entries.keys() - (ids | here)).decisions
    return [d for d in decisions if d.patch in ids or (d.patch in here and _edits(d, finding.module))]


def _edits(decision: Decision, module: str) -> bool:
    return any(edit.path == module and isinstance(edit.change, ComputeInFloat32) for edit in decision.edits)


def _runnable(decisions: list[Decision]) -> tuple[str, ...]:
    return tuple(sorted({d.patch for d in decisions if d.decided in ("applied", "opt-in")}))


def _unhelpful(decision: Decision) -> str:
    """Why a patch that answers a finding is not run, and what else its file suggests."""
    instead = registry.get(decision.patch).patch.suggests if decision.decided == "refused" else ""
    why = f"{decision.patch} answers this, but is {decision.decided} here: {decision.reason}"
    return f"{why}; {instead}" if instead else why


def _unpatched(finding: Finding, what: str) -> str:
    hints = {
        "bad-input": "look at what makes the batch",
        "bad-weight": "look at the checkpoint with `hfpatch scan`, or at the step that wrote the weight",
        "bad-buffer": "look at what moved or cast the model",
        "uninitialised-buffer": "load the model with from_pretrained, or call the module's own initialisation",
        "no-labels": "leave such a batch out of the step: hfpatch.Guard does",
    }
    hint = hints.get(finding.symptom)
    return f"No {what} is known for this" + (f"; {hint}." if hint else ".")
