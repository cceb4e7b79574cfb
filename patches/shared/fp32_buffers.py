"""Restores the buffers that a cast of the whole model rounded.

`.half()`, `.to(dtype)` or `bf16_full_eval` rounded rotary tables, or `to_empty` left them unwritten. They become what
`from_pretrained(dtype=)` leaves. By default: yes.

## What goes wrong
Rotary tables, sinusoids and scales are buffers that no checkpoint holds: the model computes them. `from_pretrained`
with dtype= leaves rotary tables in float32. `.half()`, `.bfloat16()`, `.to(dtype)` and a Trainer's `bf16_full_eval` or
`fp16_full_eval` round them too, and nothing says so: in bfloat16 an inverse frequency is off by up to 0.4 %, so at
position 1,000 its angle is off by up to 4 radians. A model that was built on meta and then moved by `to_empty` has
memory there that was never written.

## What this changes
Each buffer that equals what its class computes, rounded to half precision, becomes what `from_pretrained(dtype=)` of
the installed transformers leaves, values and dtype, so that the model computes what the same weights do when they are
loaded. Memory that was never written is replaced too: values that are not finite, all zero, a million times as large
or as small as the computed ones, or frequencies below 0 or out of order. State dict and weights stay as they are.

The loader itself rounds some buffers: Gemma's embed_scale, M2M100's sinusoids. The model was trained with them so, so
they become float32 only by name, and where a run of a tiny model of the class shows that this changes its output (not
for Gemma, whose forward rounds the scale again). What then enters the first layer is cast to the dtype of its weights.

## Numerics
equivalent: outputs are bit for bit those of a model that was loaded with dtype=. changes-function where a buffer
becomes more exact than the loader leaves it.

## Known limits
A buffer that holds other values than its class computes was set by something else (a dynamic rotary table that grew):
it is left and named. So are persistent buffers, e.g. a router's e_score_correction_bias: their digits are only in the
checkpoint; and tables of your own modules. Where a new model of the installed transformers does not tell what one of
its own tables holds, as on a release with other names, the patch is refused. Weights that the loader keeps in float32
(T5's wo, routers) are not restored: `hfpatch.inspect` names them. A later cast, evaluate() of a Trainer with
bf16_full_eval too, rounds the buffers again: status says *gone*, and apply makes the edits again.

## Sources
huggingface/transformers#29496, huggingface/transformers#29285 (rotary tables in half precision).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.patching import edits, select
from hfpatch.patching.language import Case, Effect, Needed, NotNeeded, Offered, Patch, Refused, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from hfpatch.model.cast_buffers import Cast
    from hfpatch.patching.context import Context, Target
    from hfpatch.patching.stand_ins.wider_buffers import Tried
    from hfpatch.patching.verifying.trial import Trial


FRAMES = {"max_source_positions": 16}
"""Whisper's encoder takes no other length than this; an example has 32 frames, and it halves them."""


def condition(context: Context) -> Verdict:
    """Needed if a buffer holds less than the loader leaves; offered if one that the loader rounds can be float32."""
    from hfpatch.model.cast_buffers import cast_buffers, described, in_float16, without_values

    found = cast_buffers(context.survey)
    left = f"; left: {_listed(found.left)}" if found.left else ""
    if found.cast:
        return Needed(f"a cast rounded what the loader leaves exact, {described(found.cast)}{left}")
    tried = _tried(context) if found.rounded else None
    if tried is not None and tried.differs and not (tried.casts and in_float16(context.survey)):
        what = described(found.rounded)
        return Offered(f"the loader rounds {what}; the model was trained with it{left}", suggested=False)
    if found.unfilled:
        return Refused(
            f"rounded by a cast, or never written, and not restored: {_listed(found.unfilled)}; "
            "load with from_pretrained(dtype=) in a release of transformers that was tested"
        )
    if without_values(context.survey) and not found.left:
        return NotNeeded(
            "its buffers are on meta, so nothing tells what they will hold: plan again when they are loaded"
        )
    return NotNeeded(f"its buffers are as from_pretrained(dtype=) leaves them{_why_not_wider(context)}{left}")


def _why_not_wider(context: Context) -> str:
    """Return why buffers that the loader rounds do not become float32; empty if it rounds none."""
    from hfpatch.model.cast_buffers import cast_buffers, described

    found = cast_buffers(context.survey).rounded
    if not found:
        return ""
    tried, what = _tried(context), f"; it rounds {described(found)}"
    if tried.error:
        return f"{what}, and a tiny model of the class does not take float32 there: {tried.error}"
    if tried.differs:
        return f"{what}, and float32 there would widen the float16 stream: run it in bfloat16"
    return f"{what}, where float32 would change nothing"


def _tried(context: Context) -> Tried:
    from hfpatch.model.cast_buffers import cast_buffers
    from hfpatch.patching.stand_ins.wider_buffers import tried

    survey = context.survey
    return survey.once("wider buffers", lambda: tried(survey, cast_buffers(survey).rounded))


def _listed(left: Iterable[tuple[str, str]]) -> str:
    by_reason: dict[str, list[str]] = {}
    for place, why in left:
        by_reason.setdefault(why, []).append(place)
    return "; ".join(f"{', '.join(places[:3])} ({why})" for why, places in by_reason.items())


def _wanted(context: Context) -> Mapping[str, list[Cast]]:
    """Return what is to be restored, or else what can be float32 by name, by the path of the module."""
    from hfpatch.model.cast_buffers import cast_buffers

    every = cast_buffers(context.survey)
    found: dict[str, list[Cast]] = {}
    for cast in every.cast or every.rounded:
        found.setdefault(cast.path, []).append(cast)
    return found


def _modules(context: Context) -> Iterable[Target]:
    from hfpatch.patching.context import Target

    return (Target(path, casts[0].module) for path, casts in _wanted(context).items())


def _values(context: Context, target: Target) -> Mapping[str, torch.Tensor]:
    return {cast.name: cast.values for cast in _wanted(context)[target.path]}


def _first_layers(context: Context) -> Iterable[Target]:
    """The layers into which a float32 buffer would bring a float32 stream."""
    from hfpatch.model.cast_buffers import cast_buffers
    from hfpatch.patching.context import Target

    found = cast_buffers(context.survey)
    if found.rounded and not found.cast and _tried(context).casts:
        for stacks in context.survey.stacks.values():
            yield from (Target(*stack.items[0]) for stack in stacks)


def effect(context: Context, target: Target) -> Effect:
    """Equivalent where the loader leaves it so, else changes-function."""
    from hfpatch.model.cast_buffers import cast_buffers

    return "equivalent" if cast_buffers(context.survey).cast else "changes-function"


def symptom(trial: Trial) -> str | None:
    """The logits are not those of the same weights, saved and loaded with dtype=."""
    logits, loaded = trial.logits(), trial.loaded
    if bool((logits == loaded).all()):
        return None
    return f"logits are {float((logits - loaded).norm() / loaded.norm()):.1e} away from those of a loaded model"


PATCH = Patch(
    title="Buffers that a cast rounded, as from_pretrained leaves them",
    architectures=("*",),
    whole=True,
    condition=condition,
    edits=(
        edits.set_buffers(select.Selection("modules with a rounded buffer", _modules), _values, "set the buffers"),
        edits.cast_input(
            select.Selection("first layers behind a float32 buffer", _first_layers, may_be_empty=True), to="weights"
        ),
    ),
    effect=effect,
    symptom=symptom,
    repros=(
        Case("llama", "float16", tokens=64),
        Case("qwen3", "bfloat16", tokens=64),
        Case("gemma3_text", "bfloat16", tokens=64),
        Case("deepseek_v3", "bfloat16", tokens=64),
        Case("llama", "bfloat16", tokens=64, inside="speech-llm"),
    ),
    leaves_alone=(
        Case("llama"),
        Case("m2m_100", "bfloat16"),
        Case("bloom", "float16"),
        Case("gpt2", "float16"),
        Case("whisper", "float16", config=FRAMES, cls="WhisperForConditionalGeneration"),
    ),
    answers=("cast-buffer", "uninitialised-buffer", "bad-buffer"),
)
