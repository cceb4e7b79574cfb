"""Lets RWKV's weights be the same in evaluation and in training, so that adapters on them count the same.

In evaluation RWKV divides weights by powers of 2, and not the adapters on them. It divides nothing. By default: where
an adapter is.

## What goes wrong
In evaluation RWKV divides the output maps of its later layers by powers of 2, in place, and halves the residual stream
after every `rescale_every` layers. The part of an adapter around such a map is not divided: in the last layers of a
model of 24 it counts 8 times as much as in training. Nothing fails, and the answers are not those that were trained.

## What this changes
The model does not divide. What it has divided is multiplied again, which is exact. Config and state dict stay as they
are, and only this model changes.

## Numerics
equivalent: evaluation computes what training does, bit for bit. Without adapters the division shows only in the eps of
the norms, which does not get smaller with the stream.

## Known limits
The division keeps the stream of float16 weights small. In float16 the patch is refused unless a batch shows that the
stream fits without it (`plan(batch=)`). Quantised weights are refused too: they are not divided exactly.

## Sources
huggingface/transformers, modeling_rwkv.py (its layers are rescaled for inference only).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.compat.rwkv import RESCALE, RESCALED, in_place_of_scaling
from hfpatch.patching import edits, select
from hfpatch.patching.language import Case, Needed, NotNeeded, Offered, Patch, Refused, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from hfpatch.patching.context import Context, Target
    from hfpatch.patching.verifying.trial import Trial

OFTEN = {"rescale_every": 1, "attention_hidden_size": 32}
"""A model of four layers whose last is divided by 8; in evaluation transformers takes no other width for attention."""


def condition(context: Context) -> Verdict:
    """Needed if an adapter is on a map that evaluation divides."""
    from hfpatch.model.evaluating.divided import plain_weight, scaled_maps

    maps = scaled_maps(_own(context))
    if not maps:
        return NotNeeded("it divides no weights in evaluation")
    modules = context.survey.modules
    if any(plain_weight(modules[path]) is None for path in maps):
        return Refused("it divides quantised or sharded weights in evaluation, which cannot be undone exactly")
    if context.dtype == "float16" and (why := _too_large(context)):
        return Refused(why)
    divides = f"evaluation divides {len(maps)} weights by up to {2 ** max(maps.values())}"
    if adapted := [path for path in maps if hasattr(modules[path], "base_layer")]:
        return Needed(f"{divides}, and not the adapters on {len(adapted)} of them")
    return Offered(f"{divides}, and would not divide an adapter on them; there is none now", suggested=False)


def _too_large(context: Context) -> str:
    """Return why a float16 stream may not fit without the division; empty if a batch shows that it does."""
    from hfpatch.inspecting.peaks import LIMIT
    from hfpatch.model.evaluating.divided import undivided_peak

    if context.peaks is None:
        return "the division keeps its float16 stream small; plan(batch=) measures what it would reach without"
    peak = undivided_peak(_own(context), context.peaks.values)
    fits = peak < LIMIT / 2
    return "" if fits else f"without the division its float16 stream would reach {peak:,.0f} of {LIMIT:,.0f}"


def _own(context: Context) -> list[tuple[str, nn.Module]]:
    return [] if context.submodel is None else list(context.survey.below(context.submodel.path))


def _dividing(context: Context) -> Iterable[Target]:
    """The models that divide weights of their own."""
    from hfpatch.compat.rwkv import divided_in_evaluation
    from hfpatch.patching.context import Target

    return (Target(path, module) for path, module in _own(context) if divided_in_evaluation(module))


def _divided(context: Context) -> Iterable[Target]:
    """Those whose weights are divided now."""
    from hfpatch.compat.rwkv import is_divided

    return (target for target in _dividing(context) if is_divided(target.module))


def _weights(context: Context) -> Iterable[Target]:
    """The linear maps whose weights are divided now, those in adapters too."""
    from hfpatch.compat.rwkv import divided_in_evaluation
    from hfpatch.model.wrapping import unwrapped
    from hfpatch.patching.context import Target

    for target in _divided(context):
        for name in divided_in_evaluation(target.module):
            path = f"{target.path}.{name}" if target.path else name
            yield Target(*unwrapped(path, target.module.get_submodule(name), ("adapter",)))


def _exponent(context: Context, target: Target) -> int:
    from hfpatch.model.evaluating.divided import scaled_maps

    return next(k for path, k in scaled_maps(_own(context)).items() if target.path.startswith(path))


def symptom(trial: Trial) -> str | None:
    """Evaluation gives other logits than training does; RWKV has no dropout."""
    evaluated = trial.logits()
    trial.model.train()
    trained = trial.logits()
    trial.model.eval()
    error = float((evaluated - trained).norm() / trained.norm())
    return f"the logits of evaluation are {error:.1e} away from those of training" if error > 1e-2 else None


DIVIDED = select.Selection("weights that are divided now", _weights, may_be_empty=True)

PATCH = Patch(
    title="RWKV's weights undivided in evaluation",
    architectures=("rwkv",),
    condition=condition,
    edits=(
        edits.scale_tensor(DIVIDED, "weight", _exponent, "multiply what was divided"),
        edits.set_attribute(
            select.Selection("models with divided weights", _divided, may_be_empty=True),
            RESCALED,
            lambda _context, _target: False,
            "note that nothing is divided",
        ),
        edits.set_attribute(
            select.Selection("models that divide weights", _dividing),
            RESCALE,
            lambda _context, _target: in_place_of_scaling,
            "divide no weights",
        ),
    ),
    effect="equivalent",
    tolerance=1e-4,
    symptom=symptom,
    repros=(
        Case("rwkv", inside="lora-all-linear", config=OFTEN),
        Case("rwkv", "bfloat16", inside="lora-all-linear", config=OFTEN),
    ),
    leaves_alone=(
        Case("rwkv", config=OFTEN),
        Case("rwkv", inside="lora-all-linear", config={**OFTEN, "rescale_every": 0}),
        Case("rwkv", "float16", inside="lora-all-linear", config=OFTEN),
        Case("llama", inside="lora-all-linear"),
    ),
    suggests="in float16: train and evaluate in bfloat16, or leave these maps without adapters",
)
