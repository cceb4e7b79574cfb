"""Hazards of LoRA: halves that cannot learn, judged on `lora_B`, and on `lora_A` with `lora_B` at noise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from hfpatch.guarding.checking.adapting.gates import without_gradient
from hfpatch.guarding.checking.adapting.halves import Pair, pairs
from hfpatch.guarding.checking.hazard import Hazard
from hfpatch.guarding.checking.measurement import Measurement, places
from hfpatch.guarding.checking.subject import Subject
from hfpatch.guarding.checks import clean_name
from hfpatch.model.wrapping import held


def halves(found: Measurement) -> Iterator[Hazard]:
    """What cannot learn in an adapter: it is not active, a half is frozen, a half stays 0, A is cut off.

    With B at 0 the gradient of A is 0, which says nothing. If B has a gradient, A is judged by the step with B at noise
    of `gates.look`, which comes before.
    """
    step = found.step
    if step.raised is not None or step.loss is None or not step.gradients:
        return
    yield from _not_active(found)
    trained = [p for p in pairs(found.subject) if (p.trains_a or p.trains_b) and p.b not in found.judged]
    yield from _stays_zero(found, trained)
    yield from _half_frozen(trained)
    yield from _cut_off(found, [p for p in trained if p.trains_a and p.trains_b])


def _not_active(found: Measurement) -> Iterator[Hazard]:
    """Trained adapters that PEFT's layers leave out of forward."""
    left: dict[tuple[str, str, str], list[str]] = {}
    for name, why in left_out(found.subject).items():
        if name in found.step.gradients and found.step.gradients[name] is None:
            left.setdefault(why, []).append(name)
    for (adapter, why, change), names in left.items():
        found.judged.update(names)
        yield Hazard(
            "adapter-not-active",
            certain=True,
            reason=f"{len(names)} trained parameters are those of the adapter {adapter!r}, which {why}: forward leaves "
            f"them out, and they get no gradient ({places(names)})",
            change=change,
        )


def left_out(subject: Subject) -> dict[str, tuple[str, str, str]]:
    """Return the parameters of adapters that forward leaves out: each with its adapter, why, and what to change."""
    found: dict[str, tuple[str, str, str]] = {}
    for path, layer in subject.survey.modules.items():
        inner = held(layer)
        if inner is None or inner[0] != "adapter":
            continue
        for name, _ in layer.named_parameters():
            if (why := _left_out(layer, name)) is not None:
                found[clean_name(f"{path}.{name}" if path else name)] = why
    return found


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
    """Lower halves without a gradient, or with one that stays 0 at noise, beside upper ones that have one."""
    step = found.step
    cut: list[str] = []
    for pair in pairs:
        if pair.a in found.judged:
            continue
        if not without_gradient(step, pair.b) and without_gradient(step, pair.a):
            cut.append(pair.a)
        elif pair.zero_b and step.gradients[pair.a] is not None:
            found.judged.add(pair.a)  # it is 0 because B is; what is wrong with B is said of B
    found.judged.update(cut)
    if cut:
        yield Hazard(
            "adapter-cut-off",
            certain=True,
            reason=f"{len(cut)} of {len(pairs)} lora_A get no gradient, also where lora_B is not 0, while their lora_B "
            f"do: {places(cut)}",
            change="look for detach(), no_grad() or rounding between the two halves; what a lora_A reads of its input "
            "never changes",
        )
