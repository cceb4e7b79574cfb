"""Gives norms that were added to a model the eps of the backbone they feed.

A norm that you added has another eps than the backbone it feeds. It gets the backbone's. By default: if provably
untrained.

## What goes wrong
A norm added to a language model keeps the eps its author chose (1e-4, or torch's 1e-5), although the
backbone's norms use another (1e-6 in most). Rows of small variance then come out smaller than the
backbone expects, and a checkpoint moved between two code bases that differ in eps gives other outputs.

## What this changes
`eps` (or `variance_epsilon`) of added LayerNorms and RMSNorms that feed the backbone becomes that of its final norm:
norms that only linear maps and elementwise functions follow, as a run on synthetic inputs shows, or that lie beside
the projector. An encoder's own norms, and norms whose use is unknown, are left alone and named.
Norms with provably initial values (weight 1, bias 0, trainable) are aligned in a bare apply; trained
norms only by name, because their weights were learned with the old eps. A half-precision weight without a
bias proves nothing: an optimizer step on a 1 is rounded away. Native norms are never changed
unless named with `options={"eps-alignment": {"modules": [...]}}`: many differ from the config by design
(DeepSeek-V3's latent norms, mllama's pre and post norms, Qwen2.5-VL's vision norms).

## Numerics
prepares on untrained norms, changes-function on trained ones. This gives parity, not stability: a smaller eps
raises the largest possible gain, 1/sqrt(eps), from 100 at 1e-4 to 1000 at 1e-6. Outputs change, relatively, by about
delta eps / (2 * mean square of the row).

## Known limits
An eps that is a literal in the forward, a tensor or a property cannot be set. A norm that was
frozen while later modules were trained, and is unfrozen now, counts as untrained. With
several language models in one object, the one that the norms feed is unknown: name it with
`options={"eps-alignment": {"backbone": "path.of.the.llm"}}`.

## Sources
huggingface/transformers#38025, huggingface/transformers#48762, vllm-project/vllm#35515 (norms that do not
follow the config); SALMONN-style speech LLMs that set eps by hand.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hfpatch.patching import edits, select
from hfpatch.patching.language import Case, Effect, Needed, NotNeeded, Patch, Refused, Verdict

if TYPE_CHECKING:
    from hfpatch.patching.context import Context, Target
    from hfpatch.patching.verifying.trial import Trial


def backbone_eps(context: Context) -> float | None:
    """Return the eps of the backbone's final norm, rounded to six digits; None if it has none."""
    from hfpatch.model.norms import eps_of

    norm = context.stack.final_norm if context.stack else None
    eps = None if norm is None else eps_of(norm[1])
    return None if eps is None else float(f"{eps:.6g}")


def misaligned(context: Context, target: Target) -> bool:
    """True if a norm has an eps that differs from the backbone's."""
    from hfpatch.model.norms import eps_of, same_eps

    eps, wanted = eps_of(target.module), backbone_eps(context)
    return eps is not None and wanted is not None and not same_eps(eps, wanted)


def condition(context: Context) -> Verdict:
    """Needed if this submodel is the backbone of an added norm with another eps."""
    paths = [s.path for s in context.survey.submodels]
    if context.feeds not in paths and select.loose_norms().count(context):
        return Refused(f"which backbone the added norms feed is unknown: set the option backbone to one of {paths}")
    added, left = NORMS.targets(context), _left_alone(context)
    if not added:
        return NotNeeded(f"no added norm feeds it; native norms keep the eps they came with{left}")
    wanted = backbone_eps(context)
    if wanted is None:
        return Refused(_no_eps(context))
    if not [t for t in added if misaligned(context, t)]:
        return NotNeeded(f"none of the {len(added)} added norms has an eps that can be set and is not {wanted:g}{left}")
    return Needed(f"added norms differ from the backbone's eps {wanted:g}{left}")


def _left_alone(context: Context) -> str:
    """Return the added norms with another eps that are left alone, with the reasons, as a phrase; empty if none."""
    from hfpatch.patching.stand_ins.feeding import left_alone, said

    if context.submodel is None:
        return ""
    chosen = {t.path for t in NORMS.targets(context)}
    others = {t.path for t in select.added_norms().targets(context) if misaligned(context, t)} - chosen
    reasons = {path: why for path, why in left_alone(context.survey, context.submodel).items() if path in others}
    return f"; left alone: {said(context.survey, reasons)}" if reasons else ""


def _no_eps(context: Context) -> str:
    """Return why there is no eps to align to: the final norm has none, or was not found."""
    from hfpatch.model.roles import why_unreadable

    if context.stack is not None and context.stack.final_norm is not None:
        return "the backbone's final norm has no eps to align to"
    hidden = context.submodel and not context.stacks and why_unreadable(context.survey, context.submodel)
    return f"the backbone's final norm was not found: {hidden or 'it has no list of decoder layers'}"


def effect(context: Context, target: Target) -> Effect:
    """Prepares if the norm, with all copies that PEFT keeps of it, is untrained, else changes-function."""
    from hfpatch.model.norms import as_made, untrained
    from hfpatch.model.walk import without_copy

    copies = [t.module for t in NORMS.targets(context) if without_copy(t.path) == without_copy(target.path)]
    proved = any(untrained(m) for m in copies) and all(as_made(m) for m in copies)
    return "prepares" if proved else "changes-function"


def symptom(trial: Trial) -> str | None:
    """The composite's added norm has an eps that differs from its backbone's."""
    from hfpatch.model.norms import eps_of, is_norm, same_eps

    norms = {path: eps_of(m) for path, m in trial.model.named_modules() if is_norm(m)}
    wanted = next(eps for path, eps in norms.items() if path.endswith("model.norm"))
    added = {p: e for p, e in norms.items() if not p.startswith("llm.")}
    bad = [f"{p}: eps {e:g}, backbone {wanted:g}" for p, e in added.items() if e and wanted and not same_eps(e, wanted)]
    return "; ".join(bad) or None


def _norms(context: Context) -> Iterable[Target]:
    from hfpatch.errors import InputError
    from hfpatch.model.norms import is_norm
    from hfpatch.patching.context import Target

    if context.submodel is not None:
        from hfpatch.patching.stand_ins.feeding import left_alone

        left = left_alone(context.survey, context.submodel)
        yield from (target for target in select.added_norms().find(context) if target.path not in left)
    wanted = context.options["modules"]
    norms = {path: module for path, module in context.survey.modules.items() if is_norm(module)}
    for pattern in [wanted] if isinstance(wanted, str) else wanted:
        paths = fnmatch.filter(norms, pattern)
        if not paths:
            raise InputError(f"options: eps-alignment: modules: no norm's path matches {pattern!r}")
        yield from (Target(path, norms[path]) for path in paths)


def _name(_context: Context, target: Target) -> str:
    from hfpatch.model.norms import eps_name

    return eps_name(target.module) or "eps"


NORMS = select.Selection("added or named norms", _norms)

PATCH = Patch(
    title="Added norms take the eps of the backbone they feed",
    architectures=("*",),
    condition=condition,
    edits=(
        edits.set_attribute(
            NORMS.where(misaligned, "with another eps"),
            name=_name,
            value=lambda context, _target: backbone_eps(context),
            text="set eps to the backbone's",
        ),
    ),
    effect=effect,
    symptom=symptom,
    repros=(
        Case("gemma3_text", inside="speech-llm"),
        Case("llama", inside="speech-llm"),
    ),
    leaves_alone=(
        Case("llama", inside="trained-speech-llm"),
        Case("llama"),
        Case("qwen2"),
    ),
    options={"backbone": None, "modules": ()},
)
