"""From the events of a step to its finding: the first bad tensor, and the operation that made it.

Values that are not finite on purpose are *intentional* and are ignored: -Inf in a mask that the caller made, -Inf that
a module writes itself, and bad values in rows that hold only padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hfpatch.dtypes import dtype_name
from hfpatch.model.cast_buffers import described
from hfpatch.tracing import computed_buffers, rerun_block
from hfpatch.tracing.calls import Call
from hfpatch.tracing.events import Event
from hfpatch.tracing.finding import Finding
from hfpatch.tracing.naming.cause import cause, cause_in_backward
from hfpatch.tracing.naming.origin import Origin
from hfpatch.tracing.naming.owners import Target
from hfpatch.tracing.tensors import floating
from hfpatch.tracing.watch import Watch

REPLAYS = 8
"""Maximum number of calls per step that are run again."""

AGAIN = "the block was run again and its values were finite: they depend on something that has changed since"
WRITES = "its forward changes {}, so that a second run is not the first; all of it was put back"
ROUNDED = 2.0**-7
"""Largest difference of a buffer from the value at build, relative to its largest value: it may have been rounded to
bfloat16."""


class Diagnosis:
    """Finds the first fault of one step.

    Args:
        watch: The record of the step, with the kept calls; the model must not have changed since.
        modules: The model's modules, by path.
        known: Module, role and name of tensors that are not finite on purpose, and of blocks whose zeros are no fault;
            read and added to.

    Attributes:
        intentional: Descriptions of tensors that are not finite on purpose.
    """

    def __init__(self, watch: Watch, modules: Mapping[str, nn.Module], known: set[tuple[str, str, str]]) -> None:
        self.watch, self.step, self.places, self.modules = watch, watch.step, watch.places, modules
        self.known = known
        self.intentional: list[str] = []
        self._padded = False
        self._infinite: list[Event] = []  # inputs of the model that hold -Inf
        self._replays = 0

    def finding(self) -> Finding | None:
        """Return the first fault; None if there is none."""
        for event in sorted(self.step.events, key=lambda e: e.late):  # later values say less about where they began
            if event.is_difference and (found := self._differing_buffer(event)) is not None:
                return found
            if event.bad and (found := self._diagnose(event)) is not None:
                return found
        return self._silent_zero() or self._cast_buffer()

    def _diagnose(self, event: Event) -> Finding | None:
        if event.phase == "weights":
            if event.role == "buffer" and not event.stats.nan:
                if (event.module, event.role, event.name) not in self.known:
                    self._ignore(event, "a constant")
                return None
            symptom = "bad-weight" if event.role == "parameter" else "bad-buffer"
            return self._report(event, symptom, f"the {event.role} itself holds them, before the forward pass")
        if event.phase == "forward":
            return self._forward(event)
        return self._backward(event)

    def _differing_buffer(self, event: Event) -> Finding | None:
        """Return the finding for a buffer that is finite but differs from the value its module computes at build."""
        buffer = next(e for e in self.step.events if (e.module, e.name) == (event.module, event.name))
        away = event.stats.largest
        if event.stats.nonfinite or buffer.stats.nonfinite:
            return None  # reported as not finite
        built = max(buffer.stats.largest, away)
        if away <= built * ROUNDED:
            return None
        why = f"it is {away:.3g} away from what {type(self.modules[event.module]).__name__} computes when it is built"
        return self._report(buffer, "uninitialised-buffer", why)

    def _cast_buffer(self) -> Finding | None:
        """Return the finding for buffers that a cast of the model rounded, if nothing else is wrong in the step."""
        first = {(e.module, e.name): e for e in self.step.of("weights") if e.role == "buffer" and not e.is_difference}
        cast = computed_buffers.cast(self.modules[""]) if first else ()
        worst = max((c for c in cast if (c.path, c.name) in first), key=lambda c: c.error, default=None)
        if worst is None:
            return None
        why = f"a cast of the model rounded what from_pretrained(dtype=) leaves exact, {described(cast)}"
        return self._report(first[worst.path, worst.name], "cast-buffer", why)

    def _forward(self, event: Event) -> Finding | None:
        stats = event.stats
        mask_like = stats.nan == 0 and stats.posinf == 0
        place = (event.module, event.role, event.name)
        if place in self.known or (self._padded and not mask_like):
            return None
        if event.role == "input" and event.within is None:
            if mask_like:
                self._infinite += [event] if event.module == "" else []
                return self._ignore(event, "an additive mask")
            return self._report(event, "bad-input", f"the caller passed it to {event.module or 'the model'}")
        call = self.watch.calls.get(event.within) if event.within else None
        if call is None or self._replays >= REPLAYS:
            return self._report(event, "unknown", "the operation is not known")
        self._replays += 1
        seen = rerun_block.forward(call, self._target(event, call), self._clean_blocks(event))
        if seen.obstacle is not None and (outer := self._around(event, call)) is not None:
            self._replays += 1
            again = rerun_block.forward(outer, Target(event.module, event.role, event.name, event.number), set())
            seen = again if again.origin is not None else seen
        if seen.obstacle is not None:
            return self._report(event, "unknown", f"the operation is not known: {seen.obstacle}")
        if seen.origin is None:
            if mask_like:
                return self._ignore(event, "written on purpose")
            return self._report(event, "unknown", _again(seen.changed))
        if seen.tensor is not None and self._unused(seen.tensor):
            self._padded = True
            return self._ignore(event, "rows of padding only")
        return self._from_origin(event, seen.origin)

    def _backward(self, event: Event) -> Finding | None:
        at_the_loss = event.phase == "backward" and event.forward in self.watch.final
        obstacle, changed = None, ()
        for call in self._producers(event):
            if self._replays >= REPLAYS:
                break
            self._replays += 1
            seen = rerun_block.backward(call)
            if seen.origin is not None and seen.met is not None:
                return self._made_in(call, event, seen.origin, seen.met)
            obstacle, changed = obstacle or seen.obstacle, changed or seen.changed
        if at_the_loss:
            return self._at_the_loss(event)
        if obstacle is not None:
            return self._report(event, "unknown", f"the operation is not known: {obstacle}")
        return self._report(event, "unknown", _again(changed) if self._replays else "the operation is not known")

    def _made_in(self, call: Call, event: Event, origin: Origin, met: Origin) -> Finding:
        """Return the finding for a gradient that the backward pass of a call made."""
        scale = self.step.scale or 1.0
        found = cause_in_backward(origin, met, self.modules)
        if scale > 1 and rerun_block.backward(call, 1 / scale).origin is None:
            why = f"{found.why} under the loss scale {scale:,.0f}; without the scale it fits"
            return self._report(event, "scale-too-high", why, origin, found.operation, found.operand, ordinary=True)
        return self._report(event, found.symptom, found.why, origin, found.operation, found.operand)

    def _at_the_loss(self, event: Event) -> Finding:
        """Return the finding for a gradient that was bad when it entered the model's backward pass."""
        if event.shape == () and event.stats.posinf and event.dtype == torch.float16:
            why = (
                "the loss scale itself exceeds float16's 65,504; compute the loss in float32, or start at a lower scale"
            )
            return self._report(event, "scale-too-high", why, ordinary=True)
        beside = " and ".join(self.watch.beside)
        name = (
            f"between the model and {beside}" if beside else "to name the operation, use `loss_fn = t.watch(loss_fn)`"
        )
        why = f"it comes from outside the model: the gradient that the loss passed to it holds {event.stats.holds}"
        return self._report(event, "outside-the-model", f"{why}; {name}")

    def _around(self, event: Event, call: Call) -> Call | None:
        """Return the call of the model, if it holds every call of the event's module; None if that is this call."""
        root = self.watch.calls.get(("", 0))
        return root if root is not call and event.module not in self.watch.beside else None

    def _target(self, event: Event, call: Call) -> Target:
        """Return the place of an event's tensor in a call that is run again."""
        if event.module == call.path:
            return Target(event.module, event.role, event.name, 0)
        first = min(e.number for e in self.step.of("forward") if e.within == event.within and e.module == event.module)
        return Target(event.module, event.role, event.name, event.number - first)

    def _producers(self, event: Event) -> Iterator[Call]:
        """Yield the kept calls whose backward pass can have made a gradient, the likeliest first.

        These are calls that took its tensor, blocks before the containers around them, and then those that contain it.
        A call of which no gradient of an output is finite was handed the fault by another.
        """
        tried: list[Call] = []
        takers = [c for c in self.watch.calls.values() if event.forward is not None and event.forward in c.inputs]
        inner = [c for c in takers if c.path not in self.places.containers]
        outer = sorted((c for c in takers if c.path in self.places.containers), key=lambda c: -len(c.path))
        path = self.places.enclosing(event.module)
        if event.phase == "backward" and path == event.module and event.role == "output":
            path = self.places.above(event.module)  # its own output's gradient comes from those that use it
        around: list[Call] = []
        while path is not None:
            around += reversed([c for (p, _), c in self.watch.calls.items() if p == path])
            path = self.places.above(path)
        for call in (*reversed(inner), *outer, *around):
            if not any(call is other for other in tried) and _graded(call):
                tried.append(call)
                yield call

    def _clean_blocks(self, event: Event) -> set[str]:
        """Return the blocks whose measured tensors all came before the bad one, so are finite or intentional."""
        after = {e.module for e in self.step.events if e.index >= event.index}
        before = {e.module for e in self.step.events if e.index < event.index and e.phase == "forward"}
        return {p for p in before - after if p in self.places.blocks}

    def _unused(self, tensor: torch.Tensor) -> bool:
        """True if bad values lie only in rows of padding, in this tensor and in the model's output."""
        mask = self._padding()
        final = dict(floating(self.watch.output))
        return mask is not None and all(_only_in(t, mask) for t in (tensor, *final.values()))

    def _padding(self) -> torch.Tensor | None:
        """Return which tokens are padding, bool `[batch, tokens]`; None if the attention mask does not tell.

        In a 4-D mask, tokens that attend to nothing are padding.
        """
        root = self.watch.calls.get(("", 0))
        mask: Any = root.kwargs.get("attention_mask") if root is not None else None
        if not isinstance(mask, torch.Tensor) or mask.dim() not in (2, 4):
            return None
        if mask.dim() == 2:
            return mask == 0
        lowest = torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else 0
        return (mask <= lowest).all(-1).all(1)

    def _silent_zero(self) -> Finding | None:
        """Return the finding for an all-zero output that an overflow made, such as a norm whose square is infinite.

        A block is run again only if a tensor before the output is large enough for its square to overflow, and not
        once its zeros were found to be no fault.
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
                    seen = rerun_block.forward(call, self._target(event, call), set())
                    if seen.swallowed is not None and seen.swallowed.holds != "-inf":
                        return self._from_origin(event, seen.swallowed, silent=True)
                    self.known.add(asked)
            large[event.within] = max(large.get(event.within, 0.0), largest)
        return None

    def _ignore(self, event: Event, why: str) -> None:
        self.known.add((event.module, event.role, event.name))
        self.intentional.append(f"{event.stats.holds} in {event.label} of {_place(event.module)}: {why}")

    def _from_origin(self, event: Event, origin: Origin, *, silent: bool = False) -> Finding:
        found = cause(origin, self.modules)
        if found.symptom != "masked-row" and (given := self._passed(origin)) is not None:
            why = f"{found.why}; the caller passed -Inf to the model as {given.name!r}"
            return self._report(event, "bad-input", why, origin, found.operation, found.operand)
        why = f"{found.why}, and later operations turn it into zeros" if silent else found.why
        symptom = "silent-zero" if silent else found.symptom
        return self._report(event, symptom, why, origin, found.operation, found.operand)

    def _passed(self, origin: Origin) -> Event | None:
        """Return the input of the model, other than a mask, whose -Inf an origin was given; None if there is none."""
        shapes = [o.shape for o in origin.operands if o.nonfinite]
        return next((e for e in self._infinite if e.shape in shapes and "mask" not in e.name), None)

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
        holds = "only zeros" if symptom == "silent-zero" else event.stats.holds
        return Finding(
            phase=event.phase,
            epoch=self.step.epoch,
            step=self.step.number,
            module=path,
            kind=type(self.modules[path]).__name__ if path in self.modules else "",
            tensor=f"{event.label} of {_place(event.module)}",
            operation=operation,
            operand=operand,
            holds=holds,
            symptom=symptom,
            why=why,
            dtype=dtype_name(event.dtype),
            ordinary=ordinary,
        )


def _graded(call: Call) -> bool:
    """True if the gradient of an output of a call is finite."""
    return any(bool(g.isfinite().all()) for g in call.grads.values())


def _again(changed: tuple[str, ...]) -> str:
    """Return that the values did not come again, and what the forward changed."""
    return f"{AGAIN}; {WRITES.format(', '.join(changed[:4]))}" if changed else AGAIN


def _only_in(tensor: torch.Tensor, mask: torch.Tensor) -> bool:
    """True if every non-finite value of a tensor `[batch, tokens, ...]` lies where the mask is set."""
    wrong = ~tensor.isfinite()
    if not bool(wrong.any()):
        return True
    if tensor.dim() < 2 or tensor.shape[:2] != mask.shape:
        return False
    rows = wrong.flatten(2).any(-1) if tensor.dim() > 2 else wrong
    return not bool((rows & ~mask.to(rows.device)).any())


def _place(path: str) -> str:
    return path or "the model"
