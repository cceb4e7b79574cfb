"""Hazards of half precision that are measured: lost steps and sums, buffers and weights that a cast rounds."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from hfpatch.dtypes import dtype_name
from hfpatch.guarding.checking.hazard import Hazard
from hfpatch.guarding.checking.measured import HALF
from hfpatch.guarding.checking.measurement import Measurement
from hfpatch.guarding.checking.subject import Subject
from hfpatch.guarding.checks import clean_name
from hfpatch.model.cast_buffers import cast_buffers, described

MOVED = 0.5
"""Share of the weights that one step should move."""
KEPT = 0.05
"""Share of a gradient's sum that rounding may lose over the accumulation steps."""
SAMPLE = 2**20
"""Values of a parameter that are looked at."""
ADDED = 2**16
"""Values of a gradient that are added up as often as there are accumulation steps."""


def moved(found: Measurement) -> Iterator[Hazard]:
    """The share of float16 and bfloat16 weights that one step of this optimizer moves."""
    step, subject = found.step, found.subject
    half = {
        n: (subject.parameters[n], g)
        for n, g in step.gradients.items()
        if g is not None and subject.parameters[n].dtype in HALF and bool(g.isfinite().all())
    }
    if not half:
        return
    counts: dict[str, tuple[int, int]] = {}
    rate = None
    for name, (parameter, gradient) in half.items():
        after = subject.one_step(parameter, gradient)
        if after is None:
            return
        values, rate = after
        before = parameter.detach()
        nonzero = gradient != 0
        counts[name] = (int(((values != before) & nonzero).sum()), int(nonzero.sum()))
    total = sum(n for _, n in counts.values())
    share = sum(m for m, _ in counts.values()) / total if total else 1.0
    dtype = dtype_name(next(iter(half.values()))[0].dtype)
    found.said.append(f"the share of {dtype} weights that one step at learning rate {rate:g} moves, {share:.1%}")
    if share < MOVED:
        least = min(counts, key=lambda n: counts[n][0] / max(counts[n][1], 1))
        yield Hazard(
            "steps-lost",
            certain=True,
            reason=f"one step at learning rate {rate:g} moves {share:.1%} of the {dtype} weights that have a gradient "
            f"(least: {least}, {counts[least][0] / max(counts[least][1], 1):.1%}): the rest is rounded away, step "
            "after step",
            change="keep what trains in float32 (dtype=torch.float32 when loading) and compute under bf16=True; or an "
            "optimizer with stochastic rounding or a float32 master copy",
        )


def accumulation(found: Measurement) -> Iterator[Hazard]:
    """What rounding loses of a gradient that is summed over micro-batches in half precision."""
    settings, step = found.subject.settings, found.step
    times = settings.accumulation if settings is not None else 1
    half = [g for g in step.gradients.values() if g is not None and g.dtype in HALF and bool(g.isfinite().all())]
    if times < 2 or not half:
        return
    lost = whole = 0.0
    for gradient in half:
        part = gradient.detach().flatten()[:ADDED] / times
        total = torch.zeros_like(part)
        for _ in range(times):
            total += part
        exact = part.double() * times
        lost += float((total.double() - exact).square().sum())
        whole += float(exact.square().sum())
    share = math.sqrt(lost / whole) if whole else 0.0
    found.said.append(f"the rounding of {times} gradients summed in {dtype_name(half[0].dtype)}, {share:.2%}")
    if share > KEPT:
        yield Hazard(
            "accumulation-rounds",
            certain=True,
            reason=f"adding this batch's gradient {times} times in {dtype_name(half[0].dtype)} ends {share:.1%} "
            "away from the true sum: small parts are rounded away beside the sum",
            change="fewer gradient_accumulation_steps, or weights (and so gradients) in float32",
        )


def buffers(subject: Subject) -> Iterator[Hazard]:
    """Buffers that hold less than `from_pretrained` would leave: rotary tables, sinusoids, scales."""
    found = cast_buffers(subject.survey)
    if found.cast:
        yield Hazard(
            "buffers-cast",
            certain=True,
            reason=f"a cast rounded what no checkpoint holds and from_pretrained(dtype=) leaves exact, "
            f"{described(found.cast)}: positions or scales differ from those the weights were trained with",
            change='hfpatch.apply(model, only="fp32-buffers") restores them; or load with from_pretrained(dtype=...) '
            "instead of .half() or .to()",
        )


def evaluation(subject: Subject) -> Iterator[Hazard]:
    """What a Trainer's `bf16_full_eval` or `fp16_full_eval` leaves behind."""
    asked = "" if subject.settings is None else subject.settings.full_eval
    if not asked or not subject.loaded:
        return
    dtype = torch.float16 if asked == "fp16" else torch.bfloat16
    named = {clean_name(n): p for n, p in subject.model.named_parameters() if p.is_floating_point()}
    changed = [n for n, p in named.items() if p.dtype != dtype]
    if not changed:
        return
    rounded = max(_rounding(named[n], dtype) for n in changed)
    name = dtype_name(dtype)
    yield Hazard(
        "full-eval-stays",
        certain=False,
        reason=f"{asked}_full_eval casts the model to {name} in evaluate() and "
        f"predict() outside train(), and nothing casts it back: {len(changed)} parameters ({changed[0]} first) would "
        f"lose up to {rounded:.2g} of their size, buffers too",
        change="evaluate under autocast (bf16=True or fp16=True) and leave full_eval out; or save before it",
    )


def _rounding(parameter: nn.Parameter, dtype: torch.dtype) -> float:
    values = parameter.detach().flatten()[:SAMPLE].double()
    size = float(values.norm())
    return float((values.to(dtype).double() - values).norm()) / size if size else 0.0
