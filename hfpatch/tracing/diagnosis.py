"""From what a step saw to its finding: the first tensor that is wrong, and the operation that made it.

What is *meant* is passed over: -Inf in a mask that the caller made, -Inf that a module writes on purpose, and bad
values in rows that only padding occupies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hfpatch.dtypes import dtype_name
from hfpatch.tracing import drill as replay
from hfpatch.tracing.calls import Call
from hfpatch.tracing.cause import cause
from hfpatch.tracing.events import Event
from hfpatch.tracing.finding import Finding
from hfpatch.tracing.operations import Origin
from hfpatch.tracing.tensors import floating
from hfpatch.tracing.watch import Watch

REPLAYS = 8
"""Calls of a step that are run again at most, to tell what is meant from what is wrong."""

AGAIN = "run again, it was finite: its values depend on something that changed since"
ROUNDED = 2.0**-7
"""How far a buffer may be from what was built, of its largest value: it may have been through bfloat16."""


class Diagnosis:
    """Looks for what is wrong in one step.

    Args:
        watch: The step's hooks, with the calls they kept; nothing of the model may have changed since.
        modules: Of the model, by path.
        known: Module, role and name of tensors in which -Inf is meant, and blocks in which zeros are; added to.
    """

    def __init__(self, watch: Watch, modules: Mapping[str, nn.Module], known: set[tuple[str, str, str]]) -> None:
        self.watch, self.step, self.places, self.modules = watch, watch.step, watch.places, modules
        self.known = known
        self.meant: list[str] = []
        self._padded = False
        self._replays = 0

    def finding(self) -> Finding | None:
        """The first thing that goes wrong; None if nothing does."""
        for event in self.step.events:
            if event.against and (found := self._differs(event)) is not None:
                return found
            if event.bad and (found := self._look(event)) is not None:
                return found
        return self._silent_zero()

    def _look(self, event: Event) -> Finding | None:
        if event.phase == "weights":
            if event.role == "buffer" and not event.stats.nan:
                if (event.module, event.role, event.name) not in self.known:
                    self._mean(event, "a constant")
                return None
            symptom = "bad-weight" if event.role == "parameter" else "bad-buffer"
            return self._report(event, symptom, f"the {event.role} itself holds it, before the forward pass")
        if event.phase == "forward":
            return self._forward(event)
        return self._backward(event)

    def _differs(self, event: Event) -> Finding | None:
        """A buffer that is finite and yet not what its module computes."""
        buffer = next(e for e in self.step.events if (e.module, e.name) == (event.module, event.name))
        away = event.stats.largest
        if event.stats.nonfinite or buffer.stats.nonfinite:
            return None  # told as such
        built = max(buffer.stats.largest, away)
        if away <= built * ROUNDED:
            return None
        why = f"it is {away:.3g} away from what {type(self.modules[event.module]).__name__} computes when it is built"
        return self._report(buffer, "uninitialised-buffer", why)

    def _forward(self, event: Event) -> Finding | None:
        stats = event.stats
        mask_like = stats.nan == 0 and stats.posinf == 0
        place = (event.module, event.role, event.name)
        if place in self.known or (self._padded and not mask_like):
            return None
        if event.role == "input" and event.within is None:
            if mask_like:
                return self._mean(event, "an additive mask")
            return self._report(event, "bad-input", "the model was given it")
        call = self.watch.calls.get(event.within) if event.within else None
        if call is None or self._replays >= REPLAYS:
            return self._report(event, "unknown", "the operation is not known")
        self._replays += 1
        seen = replay.forward(call, self._point(event, call), self._clean(event))
        if seen.obstacle is not None:
            return self._report(event, "unknown", f"the operation is not known: {seen.obstacle}")
        if seen.origin is None:
            if mask_like:
                return self._mean(event, "written on purpose")
            return self._report(event, "unknown", AGAIN)
        if seen.tensor is not None and self._unused(seen.tensor):
            self._padded = True
            return self._mean(event, "rows of padding only")
        return self._made(event, seen.origin)

    def _backward(self, event: Event) -> Finding | None:
        if event.phase == "backward" and event.forward in self.watch.final:
            return self._at_the_loss(event)
        call = self._behind(event)
        if call is None:
            return self._report(event, "unknown", "the operation is not known")
        seen = replay.backward(call)
        if seen.obstacle is not None:
            return self._report(event, "unknown", f"the operation is not known: {seen.obstacle}")
        if seen.origin is None:
            return self._report(event, "unknown", AGAIN)
        scale = self.step.scale or 1.0
        if scale > 1 and replay.backward(call, 1 / scale).origin is None:
            found = cause(seen.origin, self.modules)
            why = f"{found.why} under the loss scale {scale:,.0f}; without the scale it fits"
            return self._report(
                event, "scale-too-high", why, seen.origin, found.operation, found.operand, ordinary=True
            )
        return self._made(event, seen.origin)

    def _at_the_loss(self, event: Event) -> Finding:
        """A gradient that was bad when the model got it."""
        if event.shape == () and event.stats.posinf and event.dtype == torch.float16:
            why = (
                "the loss scale itself exceeds float16's 65,504; compute the loss in float32, or start at a lower scale"
            )
            return self._report(event, "scale-too-high", why, ordinary=True)
        return self._report(event, "bad-input", "the loss, which is computed outside the model, gave it")

    def _point(self, event: Event, call: Call) -> replay.Point:
        """Where the tensor of an event is in a call that is run again."""
        if event.module == call.path:
            return replay.Point(event.module, event.role, event.name, 0)
        first = min(e.number for e in self.step.of("forward") if e.within == event.within and e.module == event.module)
        return replay.Point(event.module, event.role, event.name, event.number - first)

    def _behind(self, event: Event) -> Call | None:
        """The kept call whose backward pass made a gradient: one that was given the tensor, or that it lies in."""
        if event.phase == "gradients":
            path = self.places.kept(event.module)
            calls = [c for (p, _), c in self.watch.calls.items() if p == path and c.grads]
            return calls[-1] if calls else None
        if event.forward is not None:
            takers = [c for c in self.watch.calls.values() if event.forward in c.inputs and _healthy(c)]
            takers = [c for c in takers if c.path in self.places.blocks] or takers
            if takers:
                return takers[-1]
        path = self.places.kept(event.module)
        if path is not None and path == event.module and event.role == "output":
            path = self.places.outer(path)
        while path is not None:
            calls = [c for (p, _), c in self.watch.calls.items() if p == path and _healthy(c)]
            if calls:
                return calls[-1]
            path = self.places.outer(path)
        return None

    def _clean(self, event: Event) -> set[str]:
        """Modules whose every measured tensor came before the bad one, and so was finite or meant."""
        after = {e.module for e in self.step.events if e.index >= event.index}
        before = {e.module for e in self.step.events if e.index < event.index and e.phase == "forward"}
        return {p for p in before - after if p in self.places.blocks}

    def _unused(self, tensor: torch.Tensor) -> bool:
        """Whether bad values lie in rows of padding only, here and in what the model returned."""
        mask = self._padding()
        final = dict(floating(self.watch.output))
        return mask is not None and all(_only_in(t, mask) for t in (tensor, *final.values()))

    def _padding(self) -> torch.Tensor | None:
        """Which tokens are padding, `[batch, tokens]`: by a mask of tokens, or of those that attend to nothing."""
        root = self.watch.calls.get(("", 0))
        mask: Any = root.kwargs.get("attention_mask") if root is not None else None
        if not isinstance(mask, torch.Tensor) or mask.dim() not in (2, 4):
            return None
        if mask.dim() == 2:
            return mask == 0
        lowest = torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else 0
        return (mask <= lowest).all(-1).all(1)

    def _silent_zero(self) -> Finding | None:
        """An output of nothing but zeros that an overflow made: a hand-written norm whose square is infinite.

        Looked for where something before it in the block is large enough for its square to overflow, and once a block.
        """
        large: dict[tuple[str, int], float] = {}
        for event in self.step.of("forward"):
            if event.within is None:
                continue
            largest = event.stats.largest
            zero = largest == 0 and event.stats.size > 0 and not event.stats.nonfinite and event.role == "output"
            asked = ("", "zeros", event.within[0])
            if zero and asked not in self.known:
                call = self.watch.calls[event.within]
                given = max((self.step.events[i].stats.largest for i in call.inputs), default=0.0)
                top = float(torch.finfo(event.dtype).max)
                if max(large.get(event.within, 0.0), given) ** 2 > top:
                    if self._replays >= REPLAYS:
                        return None
                    self._replays += 1
                    seen = replay.forward(call, self._point(event, call), set())
                    if seen.swallowed is not None and seen.swallowed.holds != "-inf":
                        return self._made(event, seen.swallowed, silent=True)
                    self.known.add(asked)
            large[event.within] = max(large.get(event.within, 0.0), largest)
        return None

    def _mean(self, event: Event, why: str) -> None:
        self.known.add((event.module, event.role, event.name))
        self.meant.append(f"{event.stats.holds} in {event.what} of {_place(event.module)}: {why}")

    def _made(self, event: Event, origin: Origin, *, silent: bool = False) -> Finding:
        found = cause(origin, self.modules)
        why = f"{found.why}, and what follows turns it into zeros" if silent else found.why
        symptom = "silent-zero" if silent else found.symptom
        return self._report(event, symptom, why, origin, found.operation, found.operand)

    def _report(
        self,
        event: Event,
        symptom: str,
        why: str,
        origin: Origin | None = None,
        operation: str | None = None,
        operand: str = "",
        *,
        ordinary: bool = False,
    ) -> Finding:
        path = origin.module if origin is not None else event.module
        holds = "nothing but zeros" if symptom == "silent-zero" else event.stats.holds
        return Finding(
            phase=event.phase,
            epoch=self.step.epoch,
            step=self.step.number,
            module=path,
            kind=type(self.modules[path]).__name__ if path in self.modules else "",
            tensor=f"{event.what} of {_place(event.module)}",
            operation=operation,
            operand=operand,
            holds=holds,
            symptom=symptom,
            why=why,
            dtype=dtype_name(event.dtype),
            ordinary=ordinary,
        )


def _healthy(call: Call) -> bool:
    return bool(call.grads) and all(bool(g.isfinite().all()) for g in call.grads.values())


def _only_in(tensor: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether what is not finite in a tensor `[batch, tokens, ...]` lies where the mask is set."""
    wrong = ~tensor.isfinite()
    if not bool(wrong.any()):
        return True
    if tensor.dim() < 2 or tensor.shape[:2] != mask.shape:
        return False
    rows = wrong.flatten(2).any(-1) if tensor.dim() > 2 else wrong
    return not bool((rows & ~mask.to(rows.device)).any())


def _place(path: str) -> str:
    return path or "the model"
