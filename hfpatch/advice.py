"""`hfpatch.trace`, and what its findings are answered with: the patches, tried on the traced call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Literal

from hfpatch.foretold import foretold
from hfpatch.given import FLAG, FUNCTION, TEXT, optional, want
from hfpatch.model.survey import Survey
from hfpatch.model.walk import inside, root_module, starred
from hfpatch.patch_trial import Outcome, run_again, whole_call
from hfpatch.patching import registry
from hfpatch.patching.apply import plan
from hfpatch.patching.decision import Decision
from hfpatch.symptoms import FINITE
from hfpatch.tracing.calls import Kept
from hfpatch.tracing.finding import Answer, Finding
from hfpatch.tracing.trace import Trace

BACKWARD = ("backward", "gradients")
TOO_LARGE = ("overflow", "cast-overflow")
"""Symptoms of a value outside the stream that is too large: a batch tells a patch by how much."""


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
    run again and its operations are watched. Then, for the first finding of each sort, the patches that answer it are
    tried: they are applied, the model's whole call is run again without and with them, and everything is put back
    (`.advice`, `.patches`). That costs about two more passes, once for a sort and not once for a step. Each rank traces
    its own part of the model. The statistics of every traced step are kept, about 1 kB per tensor: in a long run,
    choose steps.

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
        answers=lambda finding, kept: answer(finding, model, kept),
        foretold=lambda found: foretold(found, model),
        progress=progress,
    )


def answer(finding: Finding, model: object, kept: Kept | None = None) -> Answer:
    """Return what is known of the patches for a finding; those that could fix it are tried on the kept call.

    A patch is named only if it changes the part where the fault is, and if the call was finite with it: in every
    module, and for a fault of the backward pass in every gradient. Those that need no other patch are tried first. If
    none is enough alone, those that answer the finding and those that answer what is left are tried together, once, and
    if a value is still too large, once more with `batch=`, which measures how much is needed. First the call is run
    again as it is: if the fault does not show, a trial would prove nothing, and that is said.

    Args:
        finding: What the tracer found.
        model: The model it was found in.
        kept: The calls of its step; None if they are gone, so that nothing can be tried.
    """
    if finding.ordinary:
        return Answer(
            ("No patch is needed: a GradScaler skips this step and halves its scale; keep a guard on the run.",)
        )
    try:
        return _answer(finding, model, kept)
    except Exception as error:  # noqa: BLE001 - a registered patch may raise anything, and training goes on
        return Answer((f"the patches could not be planned: {type(error).__name__}: {error}",))


def _answer(finding: Finding, model: object, kept: Kept | None) -> Answer:
    decisions = _decisions(finding, model)
    here = _reaching(decisions, finding, model)
    root = root_module(model)
    call = "the traced call was not kept" if kept is None else whole_call(root, kept)
    if isinstance(call, str):
        here = [d for d in here if _answers(d, finding)]
    ids = _runnable(here)
    if not ids:
        of_its_kind = [d for d in here or decisions if d.vital is not None] or here[:1] or decisions[:1]
        unhelpful = tuple(_unhelpful(d, finding.module) for d in of_its_kind if _answers(d, finding))
        return Answer((*unhelpful, _unpatched(finding, "other patch" if unhelpful else "patch")))
    if isinstance(call, str):
        return _untried(ids, call)
    stock = run_again(root, call, finding)
    if stock.raised:
        return _untried(_runnable([d for d in here if _answers(d, finding)]), stock.raised)
    if not _shows(finding, stock):
        why = f"run again as it is, the call is {stock.fault or 'finite'}: it depends on something that has changed"
        return _untried(_runnable([d for d in here if _answers(d, finding)]), why)
    return _tried(finding, model, _fewest_first(ids), partial(run_again, root, call, finding))


def _shows(finding: Finding, stock: Outcome) -> bool:
    """True if the fault occurs again in a run without patches."""
    if finding.phase in BACKWARD or stock.finding is None:
        return not stock.finite
    return (stock.finding.phase, stock.finding.symptom) == (finding.phase, finding.symptom)


def _tried(finding: Finding, model: object, ids: tuple[str, ...], run: Callable[..., Outcome]) -> Answer:
    """Return what came of these patches, each alone, then together with those that answer what is left."""
    failed: list[str] = []
    union = set(ids)
    left: Finding | None = None
    for alone in (*ids, None):
        patches = tuple(sorted(union)) if alone is None else (alone,)
        if alone is None and len(patches) == 1:
            break
        outcome = run(patches)
        if outcome.short_of_memory:
            return _untried(patches, outcome.raised)
        if outcome.finite:
            return Answer((f"tried on this call: {_finite(finding, outcome)}: {_line(patches)}",), patches, tried=True)
        failed.append(f"{' and '.join(patches)}, tried on this call: {outcome.fault or outcome.raised}")
        if (left := outcome.finding) is not None:
            union |= {*_runnable(_reaching(_decisions(left, model), left, model))}
    if left is not None and left.symptom in TOO_LARGE and _may_be_measured(union, left, model):
        patches = tuple(sorted(union))
        outcome = run(patches, measured=True)
        line = f"hfpatch.apply(model, only={list(patches)}, batch=batch)"
        if outcome.finite:
            where = "with batch= the arguments of this call"
            return Answer((f"tried on this call: {_finite(finding, outcome)}: {line}, {where}",), tried=True)
        if outcome.raised:
            return Answer((*failed, f"not tried ({outcome.raised}): {line}, which measures how much is needed"))
        failed.append(f"the same with batch=, tried on this call: {outcome.fault}")
    return Answer((*failed, "No patch that is known cures it here."))


def _may_be_measured(ids: Collection[str], left: Finding, model: object) -> bool:
    """True if one of these patches is opt-in: what it does may depend on a need that a batch shows."""
    return any(d.decided == "opt-in" and d.patch in ids for d in _decisions(left, model))


def _finite(finding: Finding, outcome: Outcome) -> str:
    if finding.symptom in FINITE:
        return "gone"
    if finding.phase not in BACKWARD:
        return "finite"
    return "finite, but for the loss scale, which a GradScaler lowers" if outcome.scaled else "gradients finite"


def _untried(patches: tuple[str, ...], why: str) -> Answer:
    what = _line(patches) if patches else "no patch is known for this without a trial"
    return Answer((f"not tried ({why}): {what}",), patches)


def _line(patches: Collection[str]) -> str:
    return f"hfpatch.apply(model, only={list(patches)})"


def _decisions(finding: Finding, model: object) -> list[Decision]:
    """Return the decisions, for this model, on the patches that fix faults of a finding's symptom."""
    entries = registry.entries()
    ids = {name for name, entry in entries.items() if finding.symptom in entry.patch.answers}
    here = {name for name, entry in entries.items() if finding.symptom in entry.patch.answers_where_it_edits}
    if not ids | here:
        return []
    return [
        d
        for d in plan(model, exclude=entries.keys() - (ids | here)).decisions
        if d.patch in ids or any(inside(finding.module, edit.path) for edit in d.edits)
    ]


def _answers(decision: Decision, finding: Finding) -> bool:
    """True if a patch is declared to fix a fault, so that it can be named without a trial."""
    patch = registry.get(decision.patch).patch
    inner = any(e.change.widens and inside(finding.module, e.path) for e in decision.edits)
    return finding.symptom in patch.answers or inner


def _reaching(decisions: Iterable[Decision], finding: Finding, model: object) -> list[Decision]:
    """Return the decisions about the part of the model where the fault is: its stack of layers, else its module."""
    module = finding.module
    stacks = [stack.path for each in Survey(model).stacks.values() for stack in each if inside(module, stack.path)]
    part = max(stacks, key=len, default=module)

    def reaches(decision: Decision) -> bool:
        if decision.edits:
            return any(inside(e.path, part) or inside(module, e.path) for e in decision.edits)
        return decision.submodel is None or inside(starred(module), starred(decision.submodel))

    return [d for d in decisions if reaches(d)]


def _runnable(decisions: list[Decision]) -> tuple[str, ...]:
    return tuple(sorted({d.patch for d in decisions if d.decided in ("applied", "opt-in")}))


def _fewest_first(ids: Collection[str]) -> tuple[str, ...]:
    """Return ids so that a patch that brings others along is tried after those that do not."""
    return tuple(sorted(ids, key=lambda name: (len(registry.get(name).patch.needs), name)))


def _unhelpful(decision: Decision, module: str) -> str:
    """Return why a patch that fixes such a fault does not help here, and what its file suggests instead."""
    if decision.edits:
        where = decision.submodel or "another part of the model"
        return f"{decision.patch} fixes such a fault, but edits {where} and not {module}"
    instead = registry.get(decision.patch).patch.suggests if decision.decided == "refused" else ""
    why = f"{decision.patch} fixes this, but is {decision.decided} here: {decision.reason}"
    return f"{why}; {instead}" if instead else why


def _unpatched(finding: Finding, what: str) -> str:
    hints = {
        "bad-input": "check the data loader and collator that made the batch",
        "bad-weight": "check the checkpoint with `hfpatch scan`, or the optimizer step that wrote the weight",
        "bad-buffer": "check the code that moved or cast the model",
        "cast-buffer": "load the model with from_pretrained(dtype=) instead of casting it",
        "uninitialised-buffer": "load the model with from_pretrained, or call the module's own initialisation",
        "growth": "bound what it divides or multiplies by, or lower the learning rate before the step that it began in",
        "vanishing": "look at the initial size of that weight, or at the gain",
        "no-labels": "skip the optimizer step for such a batch, as hfpatch.Guard does",
    }
    hint = hints.get(finding.symptom)
    return f"No {what} is known for this" + (f"; {hint}." if hint else ".")
