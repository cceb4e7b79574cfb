"""Re-draws the initial weights of an added projector: its outputs become as large as the token embeddings.

An added projector writes embeddings of another size than the LLM's. It is re-drawn. By default: if provably untouched.

## What goes wrong
A projector that feeds speech or image features to a language model keeps torch's default initial values, whose outputs
have an RMS of about 0.58 for any model. Token embeddings have another size: 1.03 in Gemma 3 270M (which scales inside
its embedding module), 0.14 in SmolLM2 135M. One then dominates the other until training has corrected the projector.

## What this changes
The weight of the linear layer that writes the embeddings is re-drawn, normal with mean 0, and its bias becomes 0. The
std gives the outputs the RMS of the token embeddings as the language model sees them: rms / (rms of the layer's input *
sqrt(fan_in)); the option `std` overrides it. A bare apply does so only if the layer is trainable and provably holds
torch's initial values (every float32 value lies on the lattice that torch draws from, which one optimizer step leaves),
there is evidence that it is a projector (a name such as proj, connector, speech; an encoder or a norm of its input
width), and its output is that of the module around it. Others are re-drawn only by name; LoRA matrices and 1 + tanh
modulations never. Of several layers, only the last is re-drawn; if another operation follows it, the patch is refused.

## Numerics
prepares on an untrained projector, reinitialises on any other. The RMS is met up to sampling error: on Gemma 3 270M 0.1
% with one layer, 1.1 % with two. Its input is assumed to have RMS 1, as after a norm (the option `input_rms` changes
it); the layers before the last are run on noise of that RMS to measure the last layer's input.

## Known limits
A projector counts as untrained even if later modules were trained on its output, or a step moved only a few elements,
by chance to other lattice points. In half precision, float64 and below about 50 weights nothing is provable. The
lattice was checked on CPUs and one H200. Convolutions and sharded layers are refused, and several projectors unless
`options={"projection-init": {"modules": ["path"]}}` names them. Operations in the object's own forward are not seen.

## Sources
SALMONN-style speech LLMs that set std 0.02; torch's `at::transformation::uniform_real`, `nn.Linear.reset_parameters`.
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
    """Needed if one projector feeds the language model and provably holds its initial values."""
    from torch import nn

    from hfpatch.errors import RefusedError
    from hfpatch.model.named import check_submodel
    from hfpatch.model.projector.projector import embedding_rms, near_misses, output_rms
    from hfpatch.numerics.init import check_draw

    survey, backbone, options = context.survey, context.submodel, context.options
    check_draw(options["std"], options["seed"], options["input_rms"])
    check_submodel(survey, options["backbone"], "projection-init: backbone")
    if backbone is None or context.feeds != backbone.path:
        if context.feeds is None and any(isinstance(m, nn.Linear) for m in context.added.values()):
            paths = [s.path for s in survey.submodels]
            return Refused(f"which language model is fed is unknown: set the option backbone to one of {paths}")
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
        return Refused(f"the token embeddings of {backbone.place} {why}: apply the patch when they can be read")
    outer = float(options["input_rms"])
    wrote = ", ".join(f"{p.path} writes RMS {output_rms(survey, p, outer):.3g}" for p in chosen)
    said = (
        f"from an input of RMS {outer:g}, {wrote}; the token embeddings, as the model sees them, have {embeddings:.3g}"
    )
    misses = [] if named else [text for text, evident in near_misses(survey, backbone, _modulated(context)) if evident]
    said = "; left as it is: ".join([said, *misses[:1]])
    doubt = "" if proved_all(context, chosen) else "not provably untouched, so a new draw may discard training"
    if not named and not chosen[0].ends:
        doubt = f"{chosen[0].at} cannot be run alone, and may change the layer's output"
    if not named and not chosen[0].evidence:
        doubt = f"neither its name nor an encoder or a norm before it suggests that {chosen[0].path} is a projector"
    return Offered(f"{doubt}; {said}", suggested=False) if doubt else Needed(f"provably untouched; {said}")


def proved_all(context: Context, chosen: Iterable[Projector]) -> bool:
    """True if all projectors provably hold the values that torch drew."""
    from hfpatch.model.projector.projector import proved

    return all(proved(context.survey, p) for p in chosen)


def projectors(context: Context) -> tuple[Projector, ...]:
    """Return the one projector that feeds the model, or those that the option `modules` names."""
    from hfpatch.model.projector.projector import choose

    if context.submodel is None:
        return ()
    return choose(context.survey, context.submodel, _named(context), _modulated(context))


def effect(context: Context, target: Target) -> Effect:
    """Prepares if the layer provably holds the values that torch drew, else reinitialises."""
    mine = [p for p in projectors(context) if target.path in dict(p.copies)]
    return "prepares" if proved_all(context, mine) else "reinitialises"


def _named(context: Context) -> tuple[str, ...]:
    from hfpatch.model.named import paths

    return paths(context.survey, context.options["modules"], "projection-init: modules")


def _modulated(context: Context) -> tuple[str, ...]:
    """Return the paths of modules that multiply by 1 + tanh: their layers write factors, not embeddings."""
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
    """The RMS of the projector's outputs for noise of RMS 1 differs from the embeddings' by a factor above 1.5."""
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
