"""The finding for a step in which every value is finite, and the signal grows or vanishes in one place."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from torch import nn

from hfpatch.dtypes import dtype_name
from hfpatch.tracing.calls import Call
from hfpatch.tracing.events import Step
from hfpatch.tracing.finding import Finding
from hfpatch.tracing.growing import path, words
from hfpatch.tracing.growing.flow import Change, changes
from hfpatch.tracing.growing.followed import Followed, follow
from hfpatch.tracing.growing.thresholds import GROWS, INSIDE, OWN_CODE, SHARP, STARTING, VANISHES, suspicious
from hfpatch.tracing.growing.trend import Place

NOTHING = 1e-6
"""Initial size of weights below which they let no signal pass."""
TRIALS = 3
"""Most calls of a step that are run again."""
AGAIN = 10.0
"""Times the factor at which a place was cleared, from which on it is looked at again."""


class Growth:
    """Looks for the place where the signal of a step grows or vanishes, over all steps of a trace.

    Every module is reported once. A place that was run again and cleared is looked at again only if it became much
    worse.

    Attributes:
        found: The places that were reported.
    """

    def __init__(self) -> None:
        self.found: list[Place] = []
        self._cleared: dict[Place, float] = {}

    def finding(
        self, step: Step, calls: Mapping[tuple[str, int], Call], modules: Mapping[str, nn.Module]
    ) -> Finding | None:
        """Return the finding for a step that is over; None if there is none, or the place is known.

        Args:
            step: The step, with its statistics.
            calls: Its kept calls; the model must not have changed since.
            modules: The model's modules, by path.
        """
        kinds = {p: type(modules[p]).__name__ for p in step.blocks if p in modules}
        trials = 0
        for change in suspicious(changes(step), kinds):
            key = change.direction, change.kind, change.path
            if any(change.path == known for *_, known in self.found) or trials >= TRIALS:
                continue
            known = self._cleared.get(key)
            if known is not None and max(change.factor / known, known / change.factor) < AGAIN:
                continue
            trials += 1
            found = _confirmed(change, step, calls)
            if found is None or _unloaded(modules):
                self._cleared[key] = change.factor
                continue
            self.found.append(key)
            return _report(*found, step, modules)
        return None


def _confirmed(
    change: Change, step: Step, calls: Mapping[tuple[str, int], Call]
) -> tuple[Change, path.Way | None, Followed, str] | None:
    """Return a change that was seen again when its call was run again, with the way of the signal; None if not."""
    if change.kind == "stack":
        return _in_stack(change, step, calls)
    call = calls.get((change.path, change.number))
    if call is None:
        return None
    seen = follow(call, backward=change.direction == "backward")
    if seen.why_not is not None:
        certain = change.kind == "block" and (change.factor > INSIDE or change.factor < 1 / INSIDE)
        return (change, None, seen, seen.why_not) if certain else None
    way = _way(seen, change, step)
    if way is None:
        return None
    if change.factor < 1:
        sharp = any(s.gain < _least(seen, s) and not s.by_design for s in way.steps)
        return (change, way, seen, "") if way.net < VANISHES and sharp else None
    limit = {"block": GROWS[change.direction], "inside": INSIDE, "own code": OWN_CODE}[change.kind]
    sharp = any(s.gain > SHARP and not s.by_design for s in way.steps)
    return (change, way, seen, "") if way.net > limit and sharp else None


def _least(seen: Followed, step: path.Step) -> float:
    """Return the factor below which an operation lets the signal vanish; 0 where it is small by design.

    By design are a product of two tensors of the signal, as in a gated unit, and attention, which averages. A parameter
    that starts at 0 needs some steps to grow.
    """
    ran = seen.ran[step.ran]
    if ran.name in words.ATTENTION or (ran.name in words.PRODUCTS and ran.of_signal > 1):
        return 0.0
    return STARTING if any(o.name for o in ran.operands) else VANISHES


def _way(seen: Followed, change: Change, step: Step) -> path.Way | None:
    if change.direction == "forward":
        return path.forward(seen)
    if change.kind == "block":
        return path.backward(seen, path.into_arguments(seen))
    own = change.path if change.kind == "own code" and change.path not in step.blocks else None
    if own is not None and change.factor < 1:
        return path.backward(seen, path.smallest_within(seen, own), own)
    return path.backward(seen, path.largest_within(seen, own), own)


def _in_stack(
    change: Change, step: Step, calls: Mapping[tuple[str, int], Call]
) -> tuple[Change, path.Way | None, Followed, str] | None:
    """Return the change of a stack, with the way of the signal through the block that does most of it."""
    blocks = [
        c
        for c in changes(step)
        if c.kind == "block" and c.direction == change.direction and c.path.startswith(f"{change.path}.")
    ]
    top = max(blocks, key=lambda c: c.factor, default=None)
    call = calls.get((top.path, top.number)) if top is not None else None
    if top is None or call is None:
        return None
    seen = follow(call, backward=change.direction == "backward")
    way = _way(seen, top, step) if seen.why_not is None else None
    return change, way, seen, seen.why_not or ""


def _unloaded(modules: Mapping[str, nn.Module]) -> bool:
    """True if weights are as small as a config initialises them, and that is next to nothing.

    The vision towers of SAM and BLIP-2 have an `initializer_range` of 1e-10: without a checkpoint no signal passes.
    """
    for module in modules.values():
        range_ = getattr(vars(module).get("config"), "initializer_range", None)
        if isinstance(range_, float) and range_ < NOTHING:
            sizes = (float(p.detach().square().mean().sqrt()) for p in module.parameters() if p.dim() > 1)
            if any(range_ / 2 <= size <= range_ * 2 for size in sizes):
                return True
    return False


def _report(
    change: Change, way: path.Way | None, seen: Followed, obstacle: str, step: Step, modules: Mapping[str, nn.Module]
) -> Finding:
    grows = change.factor > 1
    counted = [s for s in way.steps if not s.by_design] if way is not None else []
    main = (max if grows else min)(counted, key=lambda s: s.gain, default=None)
    operation = words.operation(seen, main) if main is not None else None
    owner = seen.ran[main.ran].path if main is not None else change.path
    factor, before, after = change.factor, change.before, change.after
    if way is not None and change.kind != "stack":
        factor, before, after = way.whole, way.before.rms, way.after.rms
    tensor = change.tensor if change.kind == "block" else f"{change.direction} signal in {change.path or 'the model'}"
    place = change.path or "the model"
    where = f"over the {change.blocks} blocks of {place}" if change.kind == "stack" else f"in {place}"
    verb = "grows" if grows else "shrinks"
    times = f"{factor:.2g}" if grows else f"{1 / factor:.2g}"
    why = f"{change.direction} {verb} {times}-fold {where}"
    if change.kind == "stack":
        why += f", {factor ** (1 / change.blocks):.2g}-fold a block"
    if change.direction == "backward" and (largest := _largest_gradient(step)):
        why += f"; {largest}"
    if obstacle:
        why += f"; the operation is not known: {obstacle}"
    dtypes = [e.dtype for e in step.events if e.module == change.path]
    return Finding(
        phase=change.direction,
        epoch=step.epoch,
        step=step.number,
        module=owner,
        kind=type(modules[owner]).__name__ if owner in modules else "",
        tensor=tensor,
        operation=operation,
        operand=f"RMS {before:.3g} before, {after:.3g} after",
        holds="finite values only",
        symptom="growth" if grows else "vanishing",
        why=why,
        dtype=dtype_name(dtypes[0]) if dtypes else "",
    )


def _largest_gradient(step: Step) -> str:
    """Return which parameter has the largest gradient, against the others."""
    sizes = {f"{e.module}.{e.name}".lstrip("."): e.stats.largest for e in step.of("gradients") if e.stats.largest}
    if len(sizes) < 2:
        return ""
    name = max(sizes, key=sizes.__getitem__)
    others = statistics.median(size for n, size in sizes.items() if n != name)
    return f"largest gradient {name} {sizes[name]:.2g}, elsewhere {others:.2g}"
