"""Replaces the factor 1 + tanh(x) of a modulation by a sigmoid that stays between bounds and is 1 at 0.

## What goes wrong
An adapter that multiplies hidden states by 1 + tanh(x) can multiply by anything in (0, 2). At 0 a layer's output and
the gradients behind it die; near 2, some tens of layers in a row overflow. 2 * sigmoid(2 x) is the same function, and
the published repair 0.5 + 0.5 * sigmoid(x) is 0.75 at x = 0: it shrinks every layer from the first step.

## What this changes
In the forward of each such module 1 + tanh(x) becomes low + (high - low) * sigmoid(x + shift), with the shift at
which it is 1 for x = 0; (0.5, 1.5) by default. `torch` and the source stay as they are: forward hooks watch the
module's own call for a 1 that is added to a tanh. Every other tanh stays, GELUs and gates that start at 0
(`tanh(gate) * x`) too. Modules are found among the added ones by running each, alone, on made-up inputs; others are
named with `options={"sigmoid-modulation": {"modules": [...], "low": 0.5, "high": 1.5}}`.

## Numerics
prepares while tanh's argument is exactly 0 for random inputs: the factor is 1 before and after, so the outputs are
the same bits. changes-function once trained. The slope at 0 is (1 - low)(high - 1)/(high - low), 0.25 by default,
where that of 1 + tanh is 1. Bounds multiply: over 28 layers 1.5^28 = 85,223, more than float16 holds.

## Known limits
1 must be added as a number to what tanh gave, directly or through casts and changes of shape: x + x * tanh(y) and
ones + tanh(y) are not seen. A forward that checkpoints the part of itself that has them is refused when it runs; so is
torch.nn.functional.tanh under torch.compile, which hides it. Uncompiled, each call costs one tanh more and some
0.05 to 0.1 ms of Python (`benchmarks/modulation.py`).

## Sources
NPT-style modulation adapters on a frozen Llama; Perez et al., FiLM (arXiv:1709.07871).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hfpatch.patching import edits, select
from hfpatch.patching.language import Case, Effect, Needed, NotNeeded, Patch, Refused, Verdict

if TYPE_CHECKING:
    from hfpatch.patching.context import Context, Target
    from hfpatch.patching.probe import Found
    from hfpatch.patching.trial import Trial


def probed(context: Context) -> Mapping[str, Found]:
    """What a probe found, by path: of added modules whose code may have 1 + tanh, and of those that are named."""
    from hfpatch.patching.probe import modulations

    return modulations(context.survey, named(context))


def named(context: Context) -> tuple[str, ...]:
    """Paths that the option `modules` names.

    Raises:
        InputError: A name matches no module.
    """
    from hfpatch.errors import InputError

    wanted: Any = context.options["modules"]
    out: list[str] = []
    for pattern in [wanted] if isinstance(wanted, str) else wanted:
        paths = [p for p in context.survey.modules if fnmatch.fnmatchcase(p, str(pattern))]
        if not paths:
            raise InputError(f"options: sigmoid-modulation: modules: no module's path matches {pattern!r}")
        out.extend(paths)
    return tuple(dict.fromkeys(out))


def condition(context: Context) -> Verdict:
    """Needed where a module adds 1 to a tanh and the sum is a modulation."""
    from hfpatch.numerics.modulation import check_bounds, product

    low, high = check_bounds(context.options["low"], context.options["high"])
    asked = named(context)
    found = probed(context)
    for path in asked:
        if found[path].spoiled:
            return Refused(f"{path!r} was named: {found[path].spoiled}")
        if not found[path].count and not found[path].failure:
            return Refused(f"{path!r} was named: in a run of its forward no 1 was added to a tanh")
    chosen = MODULATIONS.targets(context)
    unknown = [f for f in found.values() if f.failure and f.path not in asked]
    text = "; ".join(f"{f.path!r} has a tanh and cannot be run alone ({f.failure})" for f in unknown[:2])
    if not chosen and unknown:
        return Refused(f"{text}: if it multiplies by 1 + tanh, name it in the option modules")
    if not chosen:
        return NotNeeded("no added module multiplies by 1 + tanh")
    more = f"; not judged: {text}" if unknown else ""
    several = f"; {product(low, high, len(chosen))}" if len(chosen) > 1 else ""
    return Needed(f"a factor 1 + tanh reaches 0 and 2; it will stay between {low:g} and {high:g}{several}{more}")


def effect(context: Context, target: Target) -> Effect:
    """Prepares while the modulation still puts out its 1."""
    return "prepares" if probed(context)[target.path].untrained else "changes-function"


def symptom(trial: Trial) -> str | None:
    """Modulation vectors of -8 let nothing through."""
    import torch

    from hfpatch.model.composites_modulation import Modulation

    worst = 1.0
    for module in trial.model.modules():
        if isinstance(module, Modulation):
            h = torch.ones(1, 1, module.width, dtype=module.b_mult.weight.dtype)
            with torch.no_grad():
                worst = min(worst, float(module.scaled(h, torch.full_like(h, -8.0)).min()))
    return None if worst >= 0.4 else f"a modulation can shrink its layer to {worst:.1g} of what it was"


def _modulations(context: Context) -> Iterable[Target]:
    from hfpatch.patching.context import Target

    asked = named(context)
    for found in probed(context).values():
        if found.path in asked or (found.count and not found.spoiled):
            yield Target(found.path, found.module)


def _bounds(context: Context, target: Target) -> object:
    from hfpatch.numerics.modulation import check_bounds
    from hfpatch.patching.functions import Bounded

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
