"""Adds layers to a LoRA adapter for the linear maps of its blocks that its target names miss.

A LoRA adapter misses linear layers of its blocks. It gains them, with bit-identical outputs; `fix.add_to(optimizer)`
trains them in an optimizer that exists, with the settings of their siblings. By default: no.

## What goes wrong
Target names copied from a Llama script match only modules of these names: q and v alone, or on a model with
fused maps (qkv_proj, gate_up_proj) little more than the output projections. PEFT gives no warning, the run trains
only a part of the intended layers, and the loss stays higher than it should.

## What this changes
Each active LoRA adapter of a PEFT model gains a layer on every linear map it misses in its blocks: the language
model's if it adapts that, a tower's only if it adapts the tower, and only the blocks that its config selects by index,
if it does. Routed experts, routers, heads, embeddings and projectors are left alone. Existing layers keep their weights
and identity; `target_modules` of the config becomes the union, so saving and loading work. `handle.add_to(optimizer)`
gives the new parameters to an optimizer that exists, each in the group of its siblings; `handle.new_parameters` are
they.

## Numerics
adds-parameters. A is drawn as in PEFT (from torch's global generator, with as many draws as PEFT would
make for these modules), B is 0: outputs in evaluation mode stay bit-identical until a step is taken.

## Known limits
Before injection, expand the config with `hfpatch.lora_config(model, base=config)`; a plain model is refused here.
Refused: a regular expression as target (no names can be added to it), an adapter that is merged, one whose
initialisation changes the base (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA: loading would change it again), variants
such as aLoRA or KaSA, a model inside DDP, FSDP or DeepSpeed, which register their parameters when they wrap,
and a missed map whose weights are on meta, because they are offloaded or not loaded.
A revert removes the new layers, trained or not (and reports it), and nothing else; layers of adapters added later
stay. Remove a DDP, FSDP or DeepSpeed wrapper first; it is not detected if only the model in it is passed.
Removing merged layers rounds the base weights, as PEFT's unmerge does. DoRA in half precision recomputes norms in
another dtype than its magnitudes, so outputs change by rounding, as with DoRA's own layers. If PEFT takes a name for
routed experts (gate_proj in Qwen-like mixtures of experts), maps of that name are left out; `lora_config` covers
them before injection.

## Sources
hiyouga/LlamaFactory#4020, huggingface/peft#1375, vllm-project/vllm#4915 (names that miss fused maps);
huggingface/peft#2615, huggingface/peft#3129 (names that hit towers).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hfpatch.patching import edits, select
from hfpatch.patching.language import Case, Needed, NotNeeded, Patch, Refused, Verdict

if TYPE_CHECKING:
    from torch import nn

    from hfpatch.lora.expand import Gap
    from hfpatch.patching.context import Context, Target
    from hfpatch.patching.kinds.expansion import Expansion
    from hfpatch.patching.verifying.trial import Trial


def condition(context: Context) -> Verdict:
    """Needed if an active adapter misses a linear map that PEFT can adapt and match by name."""
    from hfpatch.lora.expand import has_unmanaged_layers, tuners, why_no_new_parameters

    found = tuners(context.survey)
    if not found:
        if has_unmanaged_layers(context.survey):
            return Refused(
                "LoRA layers were injected without a PEFT model around (add_adapter, inject_adapter_in_model), "
                "and only a PEFT model can be expanded: expand the config before injection with "
                "hfpatch.lora_config(model, base=config)"
            )
        return Refused(
            "there is no PEFT model with LoRA to expand: make an adapter on all linear maps with "
            "get_peft_model(model, hfpatch.lora_config(model))"
        )
    if reason := why_no_new_parameters(context.survey):
        return Refused(reason)
    gaps = [gap for tuner in found.values() for gap in gaps_of(context, tuner)]
    if problems := [gap.problem for gap in gaps if gap.problem]:
        return Refused("; ".join(problems))
    short = [gap for gap in gaps if gap.missing]
    if away := next((path for tuner in found.values() for path in _on_meta(context, tuner)), ""):
        return Refused(
            f"the weight of {away} is on meta (offloaded, or not loaded), and so would be a new layer on it, with "
            "undefined outputs; load the model into memory, or expand the config before injection with "
            "hfpatch.lora_config(model, base=config)"
        )
    if not short:
        return NotNeeded(
            "; ".join(
                f"adapter {gap.adapter!r} misses no map it could have: {gap.before}{gap.left_out_phrase}"
                for gap in gaps
            )
        )
    return Needed(
        "; ".join(
            f"adapter {gap.adapter!r} covers {gap.before}; with {len(gap.missing)} more modules {gap.after}"
            f"{gap.left_out_phrase}"
            for gap in short
        )
    )


def gaps_of(context: Context, tuner: nn.Module) -> tuple[Gap, ...]:
    """Return the gaps of one PEFT model's adapters: of the active ones, or those that the option names."""
    from hfpatch.lora.expand import gaps

    return gaps(context.survey, tuner, context.options["adapters"])


def symptom(trial: Trial) -> str | None:
    """An adapter misses linear maps of its blocks."""
    from hfpatch.lora.expand import gaps, tuners
    from hfpatch.model.survey import Survey

    survey = Survey(trial.model)
    found = [gap for tuner in tuners(survey).values() for gap in gaps(survey, tuner, ())]
    bad = [f"adapter {gap.adapter!r} misses {len(gap.missing)} linear maps" for gap in found if gap.missing]
    return "; ".join(bad) or None


def _tuners(context: Context) -> Iterable[Target]:
    from hfpatch.lora.expand import tuners
    from hfpatch.patching.context import Target

    for path, tuner in tuners(context.survey).items():
        if _short(context, tuner):
            yield Target(path, tuner)


def _expansions(context: Context, target: Target) -> Iterable[Expansion]:
    from hfpatch.patching.kinds.expansion import Expansion

    return (Expansion(gap.adapter, gap.missing, gap.names) for gap in _short(context, target.module))


def _short(context: Context, tuner: nn.Module) -> list[Gap]:
    return [gap for gap in gaps_of(context, tuner) if gap.missing]


def _on_meta(context: Context, tuner: nn.Module) -> Iterable[str]:
    """Yield the paths, from the root, of missed linear maps with weights on meta."""
    home = context.survey.path(tuner)
    for gap in _short(context, tuner):
        for path in gap.missing:
            place = ".".join(filter(None, (home, "model", path)))
            module = context.survey.modules.get(place)
            if module is not None and any(p.is_meta for p in module.parameters()):
                yield place


PATCH = Patch(
    title="A LoRA adapter reaches every linear map of its blocks",
    architectures=("*",),
    whole=True,
    condition=condition,
    edits=(
        edits.add_targets(
            select.Selection("PEFT models with an adapter that misses linear maps", _tuners),
            _expansions,
            "add layers to the adapter",
        ),
    ),
    effect="adds-parameters",
    symptom=symptom,
    repros=(
        Case("llama", inside="lora-qv"),
        Case("phi3", inside="lora-qv"),
        Case("gpt2", inside="lora-qv"),
    ),
    leaves_alone=(Case("llama"), Case("llama", inside="lora-all")),
    options={"adapters": ()},
)
