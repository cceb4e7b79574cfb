"""Lets torch's encoder layers run their linear maps in evaluation, so that adapters on them count.

In evaluation torch's `nn.TransformerEncoderLayer` runs one kernel in place of its linear maps, so adapters on them are
ignored. It runs the maps. By default: where an adapter is.

## What goes wrong
In evaluation, without gradients, torch's `nn.TransformerEncoderLayer` hands its weights to one fused kernel. The
forwards of `linear1`, `linear2`, `self_attn` and its norms do not run, so an adapter on them is ignored: it trains, and
every evaluation, every generated text is that of the model without it. Quantised maps are passed over too.

## What this changes
The layer is told that its activation has no fused kernel, and an `nn.TransformerEncoder` around such layers that it has
no nested tensors. Both then run what they run in training. Weights and state dict stay as they are.

## Numerics
equivalent: evaluation computes what training does with dropout off, up to the rounding of attention's own kernel.
Without adapters it differs from the fused kernel by rounding only, and at padded positions, where that gives zeros.
Cost: a slower evaluation.

## Known limits
A layer with `batch_first=False`, another activation than relu and gelu, an odd number of heads or no biases has no
fused kernel and is left alone. `self_attn.out_proj` is not run in training either: torch reads its weight.

## Sources
pytorch, torch/nn/modules/transformer.py (the conditions of the fast path).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.patching import edits, select
from hfpatch.patching.language import Case, Needed, NotNeeded, Offered, Patch, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hfpatch.patching.context import Context, Target
    from hfpatch.patching.verifying.trial import Trial

ACTIVATION, NESTED = "activation_relu_or_gelu", "use_nested_tensor"
"""Attributes that torch reads at each call of a layer, and of an encoder: 0 or False, and no kernel is used."""


def condition(context: Context) -> Verdict:
    """Needed if an adapter, or another module with a forward of its own, is in a layer that would not run it."""
    from hfpatch.model.evaluating.fast_path import fast_layers, passed_over

    fast = fast_layers(context.survey.modules.items())
    if not fast:
        return NotNeeded("it has no torch encoder layer with a fused kernel for evaluation")
    passed = [f"{path}.{name}" for path, layer in fast.items() for name in passed_over(layer)]
    if passed:
        more = f" and {len(passed) - 1} more" if len(passed) > 1 else ""
        return Needed(f"evaluation would not run {passed[0]}{more}: torch's encoder layers run one kernel instead")
    return Offered(
        f"evaluation runs one kernel in place of the maps of {len(fast)} torch encoder layers; there is no adapter now",
        suggested=False,
    )


def _layers(context: Context) -> Iterable[Target]:
    """The layers whose kernel passes over something; all of them if there is nothing yet."""
    from hfpatch.model.evaluating.fast_path import fast_layers, passed_over
    from hfpatch.patching.context import Target

    fast = fast_layers(context.survey.modules.items())
    passing = {path: layer for path, layer in fast.items() if passed_over(layer)} or fast
    return (Target(path, layer) for path, layer in passing.items())


def _encoders(context: Context) -> Iterable[Target]:
    """The encoders that hold such layers and would make nested tensors."""
    from torch import nn

    from hfpatch.patching.context import Target

    layers = {target.path for target in _layers(context)}
    for path, module in context.survey.modules.items():
        inside = f"{path}.layers." if path else "layers."
        nested = isinstance(module, nn.TransformerEncoder) and getattr(module, NESTED, False)
        if nested and any(layer.startswith(inside) for layer in layers):
            yield Target(path, module)


def symptom(trial: Trial) -> str | None:
    """The logits are those of the model without its adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = trial.logits()
    layers = [module for module in trial.model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(enabled=False)
    plain = trial.logits()
    for layer in layers:
        layer.enable_adapters(enabled=True)
    return f"the logits are the same without its {len(layers)} adapters" if bool((adapted == plain).all()) else None


PATCH = Patch(
    title="torch's encoder layers run their linear maps in evaluation",
    architectures=("*",),
    whole=True,
    condition=condition,
    edits=(
        edits.set_attribute(
            select.Selection("torch encoder layers with a fused kernel", _layers),
            ACTIVATION,
            lambda _context, _target: 0,
            "run the layer's own maps",
        ),
        edits.set_attribute(
            select.Selection("encoders that make nested tensors", _encoders, may_be_empty=True),
            NESTED,
            lambda _context, _target: False,
            "make no nested tensors",
        ),
    ),
    effect="equivalent",
    tolerance=1e-5,
    symptom=symptom,
    repros=(Case("llama", inside="torch-encoder"), Case("gemma3_text", inside="torch-encoder")),
    leaves_alone=(
        Case("llama"),
        Case("llama", inside="torch-encoder-time-first"),
        Case("llama", inside="torch-encoder-plain"),
    ),
)
