"""Hazards of dtypes: in trained parameters, the optimizer, quantised layers, the GPU and attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hfpatch.compat.quantising.quantised import packed_by_a_run
from hfpatch.dtypes import dtype_name
from hfpatch.guarding.checking.hazard import Hazard
from hfpatch.guarding.checking.subject import Subject
from hfpatch.guarding.checks import can_unscale, clean_name, quantised, trained_parameters, zero_eps
from hfpatch.inspecting import facts
from hfpatch.model.roles import weights_dtype

BF16_CAPABILITY = (8, 0)
"""Compute capability below which CUDA devices have no bfloat16."""

WIDEN = (
    "keep trained parameters in float32 (dtype=torch.float32 when loading; for adapters PEFT's default, "
    "autocast_adapter_dtype=True)"
)


def float16_parameters(subject: Subject) -> Iterator[Hazard]:
    """Trained parameters are float16: a GradScaler refuses them, and without one gradients and steps underflow."""
    share = subject.share(torch.float16) if subject.knows_dtypes else None
    if share is None:
        return
    settings = subject.settings
    if subject.scaled:
        # a fused optimizer can_unscale by itself, so without clipping the GradScaler never can_unscale float16
        passes = settings is not None and settings.clip == 0.0 and settings.fused
        yield Hazard(
            "fp16-parameters",
            certain=subject.loaded and not passes,
            reason=f"{share} float16 and train under a GradScaler, which refuses to unscale float16 gradients "
            "(ValueError at the first step)",
            change=f"{WIDEN}; autocast still computes in float16",
        )
    else:
        yield Hazard(
            "fp16-parameters",
            certain=False,
            reason=f"{share} float16 and train without a loss scale: gradients below 6e-8 are 0, and a step below "
            "1/2048 of a weight is lost",
            change=f"{WIDEN}, and train with fp16=True or bf16=True",
        )


def bfloat16_under_scaler(subject: Subject) -> Iterator[Hazard]:
    """Trained parameters are bfloat16, under the GradScaler of fp16=True."""
    share = subject.share(torch.bfloat16) if subject.scaled and subject.knows_dtypes else None
    if share is None:
        return
    device = subject.device
    refused = device is not None and not can_unscale(device, torch.bfloat16)
    who = f"which on {device} refuses" if refused else "which on CUDA devices refuses (seen with torch 2.11)"
    yield Hazard(
        "bf16-under-scaler",
        certain=refused and subject.loaded,
        reason=f"{share} bfloat16 and train under a GradScaler (fp16=True), {who} to unscale bfloat16 gradients "
        "(NotImplementedError at the first step); transformers 5 loads a checkpoint in the dtype it was saved in",
        change=f"bf16=True instead of fp16=True if the GPU has bfloat16; else {WIDEN}",
    )


def eps_of_adam(subject: Subject) -> Iterator[Hazard]:
    """The optimizer's eps is 0 in the dtype of its parameters."""
    settings, optimizer = subject.settings, subject.optimizer
    if optimizer is not None:
        name, groups = type(optimizer).__name__, optimizer.param_groups
        fused = any(g.get("fused") for g in groups)
    elif settings is not None and settings.is_torch_adam and subject.knows_dtypes:
        name, fused = f"optim={settings.optim}", settings.fused
        groups = [{"eps": settings.eps, "params": list(subject.parameters.values())}]
    else:
        return
    held = subject.parameters if optimizer is None else trained_parameters(subject.model, optimizer)
    names = {id(p): n for n, p in held.items()}
    for _, eps, first, dtype in zero_eps(groups, names):
        if fused:
            then = "the fused step divides in float32, and its steps are many times the learning rate"
        else:
            then = "one step divides by 0 and makes such weights non-finite, while the gradient norm looks normal"
        yield Hazard(
            "adam-eps-zero",
            certain=subject.loaded and not fused,
            reason=f"{name} has eps={eps:g}, which is 0 in {dtype_name(dtype)} of {first}, as is the square of "
            f"a small gradient (below 2e-4): {then}",
            change=f"{WIDEN}, or set eps (adam_epsilon) of at least {torch.finfo(dtype).smallest_normal:.2g}",
        )
        return


def quantised_in_float16(subject: Subject) -> Iterator[Hazard]:
    """A quantised base computes in float16."""
    layers, half = quantised(subject.model)
    asked = dtype_name((subject.quantization or {}).get("bnb_4bit_compute_dtype")) == "float16"
    if half:
        what = f"{len(half)} quantised layers ({half[0]} first) compute in float16 by their compute_dtype"
    elif asked and not layers:
        what = "the quantised layers of this config compute in float16 by bnb_4bit_compute_dtype"
    elif layers and subject.scaled:
        what = f"{len(layers)} quantised layers ({layers[0]} first) run under float16 autocast (fp16=True)"
    elif subject.quantization is not None and not subject.loaded and subject.scaled:
        what = "the quantised layers of this config run under float16 autocast (fp16=True)"
    else:
        return
    yield Hazard(
        "quantised-fp16",
        certain=False,
        reason=f"{what}: a value beyond 65,504 becomes Inf, while bfloat16 and float32 can hold it",
        change="bnb_4bit_compute_dtype=torch.bfloat16 and bf16=True; if the GPU has no bfloat16, "
        "bnb_4bit_compute_dtype=torch.float32 and no mixed precision",
    )


def packed_for_cpu(subject: Subject) -> Iterator[Hazard]:
    """An evaluation on a CPU with AVX512-BF16 packed 4-bit weights anew: bitsandbytes 0.50 has wrong gradients then."""
    found = [clean_name(n) for n, m in subject.model.named_modules() if packed_by_a_run(m)]
    if found:
        yield Hazard(
            "packed-for-cpu",
            certain=True,
            reason=f"an evaluation on this CPU packed {len(found)} 4-bit weights of bitsandbytes anew ({found[0]} "
            "first), and its backward unpacks them as if it had not: gradients through them are wrong, the loss is not",
            change="load the model anew, and train it before it is evaluated or on another machine; what is saved now "
            "has its scales in the wrong order",
        )


def no_bfloat16(subject: Subject) -> Iterator[Hazard]:
    """Weights or autocast use bfloat16 on a GPU without it."""
    device = subject.device
    if device is None or device.type != "cuda":
        return
    brain = [clean_name(n) for n, p in subject.model.named_parameters() if p.dtype == torch.bfloat16]
    autocast = subject.settings is not None and subject.settings.precision == "bf16"
    major, minor = torch.cuda.get_device_capability(device)
    if (brain or autocast) and (major, minor) < BF16_CAPABILITY:
        what = "bf16=True" if autocast else f"{len(brain)} weights are bfloat16 ({brain[0]} first)"
        yield Hazard(
            "no-bf16-here",
            certain=False,
            reason=f"{what}, but {torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and "
            "bfloat16 needs 8.0: it is emulated, slowly, or refused",
            change=f"fp16=True, and {WIDEN}; hfpatch.plan(model, compute_dtype='float16') lists the fixes that this "
            "model needs in float16",
        )


def left_padding(subject: Subject) -> Iterator[Hazard]:
    """Eager attention runs in float16 on rows that are padded on the left."""
    for row in facts.attention(subject.survey):
        if row.implementation != "eager" or weights_dtype(subject.survey.modules[row.path]) != torch.float16:
            continue
        if subject.batch is None:
            rows = "if rows are padded on the left"
        else:
            mask: Any = subject.batch.get("attention_mask")
            if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or bool(mask[:, 0].all()):
                continue
            rows = f"{int((mask[:, 0] == 0).sum())} of {len(mask)} rows of this batch are padded on the left"
        yield Hazard(
            "left-padding-fp16",
            certain=False,
            reason=f"{clean_name(row.path) or row.cls} has eager attention in float16; {rows}: a score below -16 "
            "added to the mask's lowest value becomes -Inf, a row of such scores NaN, and NaN reaches real tokens",
            change="attn_implementation='sdpa', padding_side='right' for training, or weights in bfloat16 or float32",
        )
        return
