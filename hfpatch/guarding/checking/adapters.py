"""Hazards of LoRA: halves that cannot learn, judged on `lora_B`, or on `lora_A` with `lora_B` at noise."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from hfpatch.guarding.checking.hazard import Hazard
from hfpatch.guarding.checking.measured import places, without_gradient
from hfpatch.guarding.checking.measurement import Measurement
from hfpatch.guarding.checks import clean_name
from hfpatch.model.wrapping import held

_LOWER = re.compile(r"(?<![^.])lora_(embedding_)?A(?![^.])")


@dataclass(frozen=True)
class Pair:
    """The two halves of one adapter of one layer: what it adds is B A x, and B is 0 at the start.

    Attributes:
        a, b: Names of the halves.
        low, high: The parameters.
        trains_a, trains_b: True if the optimizer moves them.
    """

    a: str
    b: str
    low: nn.Parameter
    high: nn.Parameter
    trains_a: bool
    trains_b: bool

    @property
    def zero_a(self) -> bool:
        """True if A is exactly 0."""
        return not bool(self.low.detach().any())

    @property
    def zero_b(self) -> bool:
        """True if B is exactly 0."""
        return not bool(self.high.detach().any())


def halves(found: Measurement) -> Iterator[Hazard]:
    """What cannot learn in an adapter: it is not active, a half is frozen, a half stays 0, A is cut off.

    With B at 0 the gradient of A is 0, which says nothing. If B has a gradient, A is judged by a step with B at noise.
    """
    step = found.step
    if step.raised is not None or step.loss is None or not step.gradients:
        return
    yield from _not_active(found)
    pairs = [p for p in _pairs(found) if p.a not in found.judged and p.b not in found.judged]
    yield from _stays_zero(found, pairs)
    yield from _half_frozen(pairs)
    yield from _cut_off(found, [p for p in pairs if p.trains_a and p.trains_b])


def _pairs(found: Measurement) -> list[Pair]:
    named = {clean_name(n): p for n, p in found.subject.model.named_parameters()}
    trained = {n for n, p in found.subject.parameters.items() if p.requires_grad}
    pairs: list[Pair] = []
    for a, low in named.items():
        b = _LOWER.sub(r"lora_\1B", a)
        if b != a and b in named:
            pairs.append(Pair(a, b, low, named[b], a in trained, b in trained))
    return [p for p in pairs if p.trains_a or p.trains_b]


def _not_active(found: Measurement) -> Iterator[Hazard]:
    """Trained adapters that PEFT's layers leave out of forward."""
    left: dict[tuple[str, str, str], list[str]] = {}
    for path, layer in found.subject.survey.modules.items():
        inner = held(layer)
        if inner is None or inner[0] != "adapter":
            continue
        for name, _ in layer.named_parameters():
            whole = clean_name(f"{path}.{name}" if path else name)
            if whole not in found.step.gradients or found.step.gradients[whole] is not None:
                continue
            if (why := _left_out(layer, name)) is not None:
                left.setdefault(why, []).append(whole)
    for (adapter, why, change), names in left.items():
        found.judged.update(names)
        yield Hazard(
            "adapter-not-active",
            certain=True,
            reason=f"{len(names)} trained parameters are those of the adapter {adapter!r}, which {why}: forward leaves "
            f"them out, and they get no gradient ({places(names)})",
            change=change,
        )


def _left_out(layer: nn.Module, name: str) -> tuple[str, str, str] | None:
    """Return the adapter that a parameter is of, why forward leaves it out, and what to change; None if it does not."""
    kinds: Iterable[str] = getattr(type(layer), "adapter_layer_names", ())
    kind, _, rest = name.partition(".")
    if kind not in kinds:
        return None
    adapter = rest.partition(".")[0]
    active: Iterable[str] = getattr(layer, "active_adapters", ())
    if getattr(layer, "disable_adapters", False):
        return adapter, "is switched off", "model.enable_adapter_layers() before training"
    if getattr(layer, "merged", False):
        return adapter, "stands beside merged weights", "model.unmerge_adapter() before training"
    if adapter not in active:
        now = ", ".join(map(repr, active)) or "none"
        return (
            adapter,
            f"is not active (active: {now})",
            f"model.set_adapter({adapter!r}) before training, or leave them out of the optimizer",
        )
    return None


def _stays_zero(found: Measurement, pairs: list[Pair]) -> Iterator[Hazard]:
    """Adapters one half of which is 0 and cannot move, so that the other has a gradient of 0 for ever."""
    both = [p for p in pairs if p.zero_a and p.zero_b]
    frozen = [p for p in pairs if p not in both and ((p.zero_a and not p.trains_a) or (p.zero_b and not p.trains_b))]
    for stuck, why in ((both, "both halves are 0"), (frozen, "one half is 0 and is not trained")):
        if not stuck:
            continue
        names = [n for p in stuck for n, trains in ((p.a, p.trains_a), (p.b, p.trains_b)) if trains]
        found.judged.update(names)
        yield Hazard(
            "adapter-stays-zero",
            certain=True,
            reason=f"in {len(stuck)} of {len(pairs)} adapted layers {why}, so the gradient of the other is 0 in every "
            f"step and the adapter stays 0: {places(names)}",
            change="draw lora_A from noise and leave lora_B at 0, both trained, as PEFT's init_lora_weights=True does",
        )
    pairs[:] = [p for p in pairs if p not in both and p not in frozen]


def _half_frozen(pairs: list[Pair]) -> Iterator[Hazard]:
    for half, odd in (
        ("lora_A", [p for p in pairs if not p.trains_a]),
        ("lora_B", [p for p in pairs if not p.trains_b]),
    ):
        if odd:
            other = "lora_B" if half == "lora_A" else "lora_A"
            first = odd[0].a if half == "lora_A" else odd[0].b
            yield Hazard(
                "adapter-half-frozen",
                certain=False,
                reason=f"{half} is not trained beside a trained {other} in {len(odd)} of {len(pairs)} adapted layers "
                f"({first} first)",
                change="requires_grad_(True) on it, and pass it to the optimizer; nothing if this is meant (LoRA-FA "
                "freezes every lora_A)",
            )


def _cut_off(found: Measurement, pairs: list[Pair]) -> Iterator[Hazard]:
    """Lower halves without a gradient beside upper ones that have one."""
    step = found.step
    cut: list[str] = []
    doubtful: list[Pair] = []
    for pair in pairs:
        gradient = step.gradients[pair.a]
        if without_gradient(step, pair.b):
            if gradient is not None and pair.zero_b:
                found.judged.add(pair.a)  # it is 0 because B is; what is wrong with B is said of B
        elif gradient is None or (not pair.zero_b and not bool(gradient.any())):
            cut.append(pair.a)
        elif not bool(gradient.any()):
            doubtful.append(pair)
    again = _at_noise(found, doubtful)
    found.judged.update(p.a for p in doubtful)
    cut += again
    found.judged.update(cut)
    if cut:
        noise = ", also with lora_B at noise" if again else ""
        yield Hazard(
            "adapter-cut-off",
            certain=True,
            reason=f"{len(cut)} of {len(pairs)} lora_A get no gradient{noise}, while their lora_B do: {places(cut)}",
            change="look for detach(), no_grad() or rounding between the two halves; what a lora_A reads of its input "
            "never changes",
        )


def _at_noise(found: Measurement, pairs: list[Pair]) -> list[str]:
    """Return which lower halves get no gradient though B is noise; B itself is not written."""
    if not pairs:
        return []
    if not found.affords():
        found.missed.append(f"{len(pairs)} lora_A with lora_B at noise: a check may cost 3.5 steps")
        return []
    draw = torch.Generator().manual_seed(0)
    noise = {
        p.high: (torch.randn(p.high.shape, generator=draw) / max(p.high.shape[-1], 1) ** 0.5).to(p.high) for p in pairs
    }
    step = found.run(reentrant=found.asked, instead=noise)
    if step.raised is not None or not step.backward:
        why = step.raised.error if step.raised is not None else "the loss has no graph then"
        found.missed.append(f"{len(pairs)} lora_A with lora_B at noise: {why}")
        return []
    found.said.append(f"the gradients of {len(pairs)} lora_A with lora_B at noise")
    return [p.a for p in pairs if without_gradient(step, p.a)]
