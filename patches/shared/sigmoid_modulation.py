"""Replaces the factor 1 + tanh(x) of a modulation by a sigmoid that stays between bounds and is 1 at 0.

Your module multiplies by `1 + tanh(x)`, which reaches 0 and doubles. It becomes a bounded sigmoid, exactly 1 at 0. By
default: while the argument of its tanh is 0.

## What goes wrong
An adapter that multiplies hidden states by 1 + tanh(x) can multiply by any factor in (0, 2). Near 0 a layer's output
and the gradients through it vanish; near 2, a few tens of layers overflow. 2 * sigmoid(2 x) is the same function, and
the published fix 0.5 + 0.5 * sigmoid(x) is 0.75 at x = 0: it shrinks every layer from the first step.

## What this changes
In the forward of each such module, 1 + tanh(x) becomes low + (high - low) * sigmoid(x + shift), with the shift that
makes it 1 for x = 0; (0.5, 1.5) by default. `torch` and the source stay as they are: forward hooks intercept the
addition of 1 to a tanh in the module's call. Every other tanh stays, also in GELUs and in gates that start at 0
(`tanh(gate) * x`). Modules are found among the added ones, and the object itself, by running a copy of each, alone,
on synthetic inputs; name others with `options={"sigmoid-modulation": {"modules": [...], "low": 0.5, "high": 1.5}}`.

## Numerics
prepares while the input of every tanh is zero and comes from a linear layer, or a parameter, of zeros (tested in runs
of several lengths, in training mode, with and without each optional argument): the factor is 1 before and after, so
the outputs are bit-identical. changes-function otherwise. The slope at 0 is (1 - low)(high - 1)/(high - low), 0.25 by
default; that of 1 + tanh is 1. Bounds multiply: over 28 layers 1.5^28 = 85,223, more than float16 holds.

## Known limits
1 must be added as a number to the result of tanh, directly or after casts and changes of shape: x + x * tanh(y) and
ones + tanh(y) are not seen. A forward that checkpoints this part of itself is refused, in the plan if a run shows it,
else when it runs; so is torch.nn.functional.tanh under torch.compile, which hides it. A second 1 + tanh
in the same forward that is not a modulation (a GELU) is refused too. A branch that no run took is not tested.
Uncompiled, each call costs one more tanh and about 0.05 to 0.1 ms of Python (`benchmarks/modulation.py`).

## Sources
NPT-style modulation adapters on a frozen Llama; Perez et al., FiLM (arXiv:1709.07871).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from hfpatch.patching import edits, select
from hfpatch.patching.language import Case, Effect, Needed, NotNeeded, Patch, Refused, Verdict

if TYPE_CHECKING:
    from hfpatch.patching.context import Context, Target
    from hfpatch.patching.kinds.one_plus_tanh import Bounded
    from hfpatch.patching.tanh.probe import Found
    from hfpatch.patching.verifying.trial import Trial


def probed(context: Context) -> Mapping[str, Found]:
    """Return the probe's results by path, for users' modules whose code may have 1 + tanh and for named modules."""
    from hfpatch.patching.tanh.probe import modulations

    return modulations(context.survey, named(context))


def named(context: Context) -> tuple[str, ...]:
    """Return the paths that the option `modules` names.

    Raises:
        InputError: A name matches no module, or is not a name.
    """
    from hfpatch.model.named import paths

    return paths(context.survey, context.options["modules"], "sigmoid-modulation: modules")


def condition(context: Context) -> Verdict:
    """Needed if a module multiplies by 1 + tanh and that can be replaced."""
    from hfpatch.numerics.modulation import check_bounds, product

    low, high = check_bounds(context.options["low"], context.options["high"])
    asked = named(context)
    found = probed(context)
    for path in asked:
        why = found[path].spoiled or stands_in_the_way(context, found[path])
        if not why and not found[path].sums and not found[path].failure:
            why = "a run of its forward added no 1 to a tanh"
        if why:
            return Refused(f"{path!r} was named: {why}")
    chosen = MODULATIONS.targets(context)
    left = [f for f in found.values() if f.path not in asked and f.path not in {t.path for t in chosen}]
    text = "; ".join([t for f in left if (t := unjudged(context, f))][:2])
    if not chosen and text:
        return Refused(text)
    if not chosen:
        return NotNeeded("no added module was seen to multiply by 1 + tanh")
    more = f"; left as they are: {text}" if text else ""
    several = f"; {product(low, high, len(chosen))}" if len(chosen) > 1 else ""
    return Needed(f"a factor 1 + tanh can approach 0 and 2; it will stay between {low:g} and {high:g}{several}{more}")


def stands_in_the_way(context: Context, found: Found) -> str:
    """Return why 1 + tanh cannot be replaced in a module, modulation or not; empty if it can."""
    from hfpatch.model.walk import inside

    compiled = any(inside(found.path, other) or inside(other, found.path) for other in context.survey.compiled)
    if found.sums and found.functional and compiled:
        return (
            "it is compiled and calls torch.nn.functional.tanh, which torch.compile hides from the patch; "
            "use torch.tanh instead"
        )
    return found.obstacle


def unjudged(context: Context, found: Found) -> str:
    """Return why a module that may be a modulation is left as it is; empty if it is not one."""
    place = repr(found.path) if found.path else f"{type(found.module).__name__} itself ('')"
    if found.failure:
        why = f"has a tanh and cannot be run alone ({found.failure}): if it multiplies by 1 + tanh, name it"
        return f"{place} {why} in the option modules"
    if found.given and not found.spoiled:
        return f"{place} returns 1 + tanh: if that is used as a factor, name it in the option modules"
    if found.count and found.spoiled:
        return (
            f"{place} multiplies by 1 + tanh, and has another that is not a modulation ({found.spoiled}): move one of "
            "them to a separate module"
        )
    why = stands_in_the_way(context, found) if found.count else ""
    return f"{place} multiplies by 1 + tanh: {why}" if why else ""


def effect(context: Context, target: Target) -> Effect:
    """Prepares if the factor is still 1 (untrained), else changes-function."""
    return "prepares" if probed(context)[target.path].untrained else "changes-function"


def symptom(trial: Trial) -> str | None:
    """A modulation vector of -8 shrinks a layer's output to less than 0.4 times its size."""
    import torch

    from hfpatch.lab.composites_modulation import Modulation

    worst = 1.0
    for module in trial.model.modules():
        if isinstance(module, Modulation):
            h = torch.ones(1, 1, module.width, dtype=module.b_mult.weight.dtype)
            with torch.no_grad():
                worst = min(worst, float(module.scaled(h, -8.0).min()))
    return None if worst >= 0.4 else f"a modulation can shrink its layer to {worst:.1g} of what it was"


def _modulations(context: Context) -> Iterable[Target]:
    from hfpatch.patching.context import Target

    asked = named(context)
    for found in probed(context).values():
        free = found.count and not found.spoiled and not stands_in_the_way(context, found)
        if found.path in asked or free:
            yield Target(found.path, found.module)


def _bounds(context: Context, target: Target) -> Bounded:
    from hfpatch.numerics.modulation import check_bounds
    from hfpatch.patching.kinds.one_plus_tanh import Bounded

    return Bounded(
        *check_bounds(context.options["low"], context.options["high"]), probed(context)[target.path].functional
    )


MODULATIONS = select.Selection("modules that multiply by 1 + tanh", _modulations)

PATCH = Patch(
    title="A bounded sigmoid where a modulation multiplies by 1 + tanh",
    architectures=("*",),
    whole=True,
    condition=condition,
    edits=(edits.bound_modulation(MODULATIONS, _bounds),),
    effect=effect,
    symptom=symptom,
    repros=(
        Case("llama", inside="modulated"),
        Case("llama", inside="trained-modulated"),
        Case("gemma3_text", inside="modulated"),
    ),
    leaves_alone=(
        Case("llama", inside="trained-modulated"),
        Case("llama", inside="gated"),
        Case("gpt2"),
    ),
    options={"low": 0.5, "high": 1.5, "modules": ()},
)
