"""Keeps sdpa attention off a cuDNN kernel whose backward pass gives NaN.

A cuDNN kernel gives NaN gradients with a finite loss, on Hopper GPUs. Attention runs without it. By default: if a probe
fails.

## What goes wrong
On Hopper GPUs, since torch 2.11, sdpa's default backend gives NaN gradients of the queries although output and loss
are finite, if a mask is given, the number of keys is 64 modulo 128, and all logits of a row are below about -88.
Observed on an H100 with torch 2.11 and cuDNN 9.19: in float16 and bfloat16, for widths 64 to 256, boolean and additive
masks; of all lengths tried (8 to 400 in steps of 8, and up to 4,160) only 64, 192, 320, 1,088, ..., and never with
`is_causal` in place of a mask. Training then fails at the first such batch, after a normal forward pass.

## What this changes
The submodel's attention implementation becomes `hfpatch_sdpa_without_cudnn`: transformers' sdpa attention, which for
these lengths uses torch's other backends for the duration of the call. The backward pass uses the backend of the
forward pass. Other lengths, and calls without a mask, run as before.

## Numerics
equivalent: the same function from another fused kernel. For these lengths attention takes 2.2 to 2.5
times as long (`benchmarks/attention_speed.py --tokens 4160`, H100), for all others 1.00 times.

## Known limits
Needed only on a Hopper GPU with sdpa attention, if a probe of the failing shape, run once per device and process,
gives NaN. torch's switch is process-wide while an attention call of this model runs: another thread that chooses
a backend in those microseconds does not get cuDNN's either. Modules that call torch's attention directly are not
changed.

## Sources
pytorch/pytorch#196678, huggingface/trl#7181 (symptom).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.patching import edits, select
from hfpatch.patching.kinds.attention_names import WITHOUT_CUDNN
from hfpatch.patching.language import Case, Needed, NotNeeded, Patch, Verdict

if TYPE_CHECKING:
    from hfpatch.patching.context import Context
    from hfpatch.patching.verifying.trial import Trial

HOPPER = (9, 0)

FAILING = {"*q_proj.bias": 4.0, "*k_proj.bias": -4.0}
"""Logits of about -4 * 4 * 128 / sqrt(128) = -181."""


def condition(context: Context) -> Verdict:
    """Needed if the weights are on a GPU on which the probe gives NaN."""
    import torch

    from hfpatch.numerics.attention_functions import cudnn_backward_fails

    if not context.attentions or context.submodel is None:
        return NotNeeded("none of its own modules computes attention through transformers' AttentionInterface")
    if context.attention not in ("sdpa", WITHOUT_CUDNN):
        return NotNeeded(f"its attention is {context.attention}, not sdpa")
    device = next(context.submodel.model.parameters()).device
    if device.type != "cuda":
        return NotNeeded(f"its weights are on {device.type}; the fault occurs on Hopper GPUs")
    if torch.cuda.get_device_capability(device) != HOPPER:
        return NotNeeded(f"{torch.cuda.get_device_name(device)} is not a Hopper GPU; the fault occurs on these")
    where = f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    if not cudnn_backward_fails(device):
        return NotNeeded(f"the probe's gradients are finite here ({where})")
    return Needed(f"probed on this GPU: sdpa's default backend gives NaN gradients ({where})")


def symptom(trial: Trial) -> str | None:
    """Gradients that are not finite."""
    bad = trial.bad_gradients()
    return f"non-finite gradients of {len(bad)} parameters, first {bad[0]}" if bad else None


FAILS = Case(
    "qwen2",
    dtype="bfloat16",
    attention="sdpa",
    fill=FAILING,
    config={"head_dim": 128, "max_position_embeddings": 256},
    padded=5,
    tokens=192,
    device="cuda",
)

PATCH = Patch(
    title="sdpa attention without the cuDNN kernel whose gradients are NaN",
    architectures=("*",),
    condition=condition,
    edits=(edits.choose_attention(select.submodel(), WITHOUT_CUDNN, "compute attention without cuDNN"),),
    effect="equivalent",
    symptom=symptom,
    repros=(FAILS,),
    leaves_alone=(Case("qwen2", attention="sdpa"), Case("qwen2", dtype="bfloat16", attention="sdpa")),
    tolerance=2e-2,
    answers=("attention-backward-nan",),
)
