"""Re-draws an added projector, so that its outputs are as large as the token embeddings beside them.

## What goes wrong
A projector that feeds speech or image features to a language model keeps torch's default initial values,
whose outputs have an RMS of about 0.58 whatever the model. Token embeddings have another size: 1.03 in
Gemma 3 270M (which scales inside its embedding module), 0.14 in SmolLM2 135M. The features then drown the text, or
are drowned, until training has moved the projector that far.

## What this changes
The weight of the linear layer that writes the embeddings is drawn anew, normal with mean 0, and its bias becomes 0.
The std is chosen so that the outputs have the RMS of the token embeddings as the language model sees them:
rms / (rms of what the layer reads * sqrt(fan_in)); `std` fixes it. A bare apply does so only where the layer provably
holds torch's own initial values and may train (every float32 value lies on the lattice torch draws from, which one
optimizer step leaves), something speaks for its being a projector (a name such as proj, connector, speech; an encoder
or a norm of the width it reads), and the module around it puts out what the layer does. Any other is re-drawn only
when the patch is named; LoRA matrices and layers of a 1 + tanh modulation never are. Of several layers the last is
meant; where a norm, a gate or a residual path follows it, that is a refusal.

## Numerics
prepares on an untouched projector, reinitialises on any other. The RMS is met to sampling error: on Gemma 3 270M to
0.1 % by one layer, to 1.1 % by two. The projector is assumed to read features of RMS 1, as a norm before it gives
(`input_rms` says otherwise); the layers before the last are run on noise of that RMS to measure what it reads.

## Known limits
An untouched projector behind which something was trained looks untouched, and so does one of which a step moved a few
elements only and by chance to other lattice points. In half precision, in float64 and below some 50 weights nothing is
provable. The lattice was checked on CPUs and on one H200. Convolutions and sharded layers are refused; so are several
projectors, of which `options={"projection-init": {"modules": ["path"]}}` names one. What follows a layer in the
forward of the object itself is not seen.

## Sources
The SALMONN-style speech LLMs that set std 0.02 by hand; `at::transformation::uniform_real` and
`nn.Linear.reset_parameters` of torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hfpatch.patching import edits, select
from hfpatch.patching.language import Case, Effect, Needed, NotNeeded, Offered, Patch, Refused, Verdict

if TYPE_CHECKING:
    from hfpatch.model.projector.projector import Projector
    from hfpatch.patching.context import Context, Target
    from hfpatch.patching.verifying.trial import Trial


def condition(context: Context) -> Verdict:
    """Needed where the fed language model has one projector and it is provably untouched."""
    from torch import nn

    from hfpatch.errors import RefusedError
    from hfpatch.model.named import check_submodel
    from hfpatch.model.projector.projector import embedding_rms, output_rms, unfit
    from hfpatch.numerics.init import check_draw

    survey, backbone, options = context.survey, context.submodel, context.options
    check_draw(options["std"], options["seed"], options["input_rms"])
    check_submodel(survey, options["backbone"], "projection-init: backbone")
    if backbone is None or context.feeds != backbone.path:
        if context.feeds is None and any(isinstance(m, nn.Linear) for m in context.added.values()):
            paths = [s.path for s in survey.submodels]
            return Refused(f"which language model is fed cannot be told: set the option backbone to one of {paths}")
        return NotNeeded("no added projector feeds it")
    named = _named(context)
    try:
        chosen = projectors(context)
    except RefusedError as error:
        return Refused(str(error))
    if not chosen:
        return NotNeeded("no added linear layer writes into its embedding space")
    embeddings = embedding_rms(survey, backbone)
    if not embeddings:
        why = "are all zero" if embeddings == 0 else "are not loaded, or sharded"
        return Refused(f"token embeddings of {backbone.place} {why}: apply it where they can be read")
    outer = float(options["input_rms"])
    wrote = ", ".join(f"{p.path} writes RMS {output_rms(survey, p, outer):.3g}" for p in chosen)
    said = f"fed RMS {outer:g}, as after a norm, {wrote}; token embeddings as the model sees them have {embeddings:.3g}"
    beside = [] if named else [text for text, speaks in unfit(survey, backbone, _modulated(context)) if speaks]
    said = "; left as it is: ".join([said, *beside[:1]])
    doubt = "" if proved_all(context, chosen) else "not provably untouched, so a new draw may forget something"
    if not named and not chosen[0].ends:
        doubt = f"{chosen[0].at} cannot be run alone, and may change what that puts out"
    if not named and not chosen[0].evidence:
        doubt = f"neither its name nor an encoder or a norm before it says that {chosen[0].path} is a projector"
    return Offered(f"{doubt}; {said}", suggested=False) if doubt else Needed(f"provably untouched; {said}")


def proved_all(context: Context, chosen: Iterable[Projector]) -> bool:
    """Whether all provably hold what torch drew."""
    from hfpatch.model.projector.projector import proved

    return all(proved(context.survey, p) for p in chosen)


def projectors(context: Context) -> tuple[Projector, ...]:
    """The one projector of the fed model, or those that the option `modules` names."""
    from hfpatch.model.projector.projector import choose

    if context.submodel is None:
        return ()
    return choose(context.survey, context.submodel, _named(context), _modulated(context))


def effect(context: Context, target: Target) -> Effect:
    """Prepares where the layer provably holds what torch drew."""
    mine = [p for p in projectors(context) if target.path in dict(p.copies)]
    return "prepares" if proved_all(context, mine) else "reinitialises"


def _named(context: Context) -> tuple[str, ...]:
    from hfpatch.model.named import paths

    return paths(context.survey, context.options["modules"], "projection-init: modules")


def _modulated(context: Context) -> tuple[str, ...]:
    """Paths of modules that multiply by 1 + tanh: their layers write factors, no embeddings."""
    from hfpatch.model.walk import inside
    from hfpatch.patching.tanh.probe import modulations

    home = context.submodel.path if context.submodel else ""
    found = modulations(context.survey)
    return tuple(p for p, f in found.items() if f.count and p and not inside(home, p))


def _draw(context: Context, target: Target) -> object:
    from hfpatch.model.projector.projector import embedding_rms, input_rms
    from hfpatch.numerics.init import Normal

    chosen = projectors(context)
    index = next(i for i, p in enumerate(chosen) if target.path in dict(p.copies))
    std: float | None = context.options["std"]
    if std is None:
        rms = (embedding_rms(context.survey, context.submodel) if context.submodel else None) or 0.0
        reads = input_rms(context.survey, chosen[index], float(context.options["input_rms"]))
        std = float(f"{rms / (reads * math.sqrt(chosen[index].layer.in_features)):.4g}")
    return Normal(std, context.options["seed"] + index)


def _zeros(_context: Context, _target: Target) -> object:
    from hfpatch.numerics.init import Zeros

    return Zeros()


def symptom(trial: Trial) -> str | None:
    """The projector's outputs for features of RMS 1 are more than 1.5 times larger or smaller than embeddings."""
    import torch

    from hfpatch.model.embed import embed_tokens
    from hfpatch.model.projector.projector import rms

    layer: Any = trial.model.get_submodule("speech_proj")
    noise = torch.randn(512, layer.in_features, generator=torch.Generator().manual_seed(1)).to(layer.weight)
    with torch.no_grad():
        mine, text = rms(layer(noise)), rms(embed_tokens(trial.model)(torch.arange(64)))
    return None if 1 / 1.5 < mine / text < 1.5 else f"features of RMS {mine:.3g} beside embeddings of RMS {text:.3g}"


def _layers(context: Context) -> Iterable[Target]:
    from hfpatch.patching.context import Target

    return (Target(path, layer) for p in projectors(context) for path, layer in p.copies)


def _has_bias(_context: Context, target: Target) -> bool:
    from torch import nn

    return isinstance(getattr(target.module, "bias", None), nn.Parameter)


LAYER = select.Selection("the linear layer that writes the embeddings", _layers)
BIASED = replace(LAYER.where(_has_bias, "with a bias"), may_be_empty=True)

PATCH = Patch(
    title="An added projector starts with outputs as large as the token embeddings",
    architectures=("*",),
    condition=condition,
    edits=(
        edits.set_tensor(LAYER, name="weight", value=_draw, text="draw the weight anew"),
        edits.set_tensor(BIASED, name="bias", value=_zeros, text="set the bias to 0"),
    ),
    effect=effect,
    symptom=symptom,
    repros=(
        Case("gemma3_text", inside="speech-llm"),
        Case("llama", inside="speech-llm"),
    ),
    leaves_alone=(
        Case("llama", inside="trained-speech-llm"),
        Case("llama", dtype="float16", inside="speech-llm"),
        Case("llama"),
    ),
    options={"modules": (), "std": None, "seed": 0, "input_rms": 1.0, "backbone": None},
)
