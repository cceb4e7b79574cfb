"""Gradients of 0 that say nothing: those behind a parameter that is 0 at the start, such as LoRA's B or a gate."""

from __future__ import annotations

import torch
from torch import nn

from hfpatch.guarding.checking.adapting.halves import noise
from hfpatch.guarding.checking.measurement import Measurement, places
from hfpatch.guarding.checking.rehearsal import Rehearsal


def look(found: Measurement) -> None:
    """Judge parameters with a gradient of 0 by a step in which the gates are noise; no gate is written.

    A gate is a trained parameter, no bias, that is exactly 0 and has a gradient, so that it moves with the first step.
    Parameters that get a gradient then, or of which it cannot be told, are judged: nothing is wrong with them.
    """
    step, held = found.step, found.subject.parameters
    if step.raised is not None or not step.backward:
        return
    still = [n for n, g in step.gradients.items() if g is not None and without_gradient(step, n)]
    gates = {n: held[n] for n in step.gradients if not without_gradient(step, n) and _is_gate(n, held[n])}
    if not still or not gates:
        return
    what = f"{len(still)} gradients that were 0, again with noise in place of what starts at 0 ({places(list(gates))})"
    if not found.affords():
        found.judged.update(still)
        found.missed.append(f"{what}: a check may cost 3.5 steps")
        return
    draw = torch.Generator().manual_seed(0)
    again = found.run(reentrant=found.asked, instead={p: noise(p, draw) for p in gates.values()}, of=still)
    if again.raised is not None or not again.backward:
        why = again.raised.error if again.raised is not None else "the loss has no graph then"
        found.judged.update(still)
        found.missed.append(f"{what}: {why}")
        return
    found.said.append(what)
    found.judged.update(n for n in still if not without_gradient(again, n))


def without_gradient(step: Rehearsal, name: str) -> bool:
    """True if a parameter has no gradient, or one that is exactly 0."""
    gradient = step.gradients.get(name)
    return gradient is None or not bool(gradient.any())


def _is_gate(name: str, parameter: nn.Parameter) -> bool:
    return not name.endswith("bias") and not bool(parameter.detach().any())
