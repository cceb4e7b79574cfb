"""What went into and came out of each block, and the factor between the two, forward and backward.

A factor compares RMS values. The largest value is no sign: in healthy models it jumps a hundredfold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from hfpatch.tracing.events import Event, Operation, Passage, Step

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Change:
    """The change of the signal's size in one call.

    Attributes:
        direction: `forward` or `backward`.
        kind: `block` for what goes in against what comes out, `inside` for a gradient within against the one that came
            in, `own code` for operations that a container runs itself, `stack` for all blocks of a list together.
        path, number: The call. For a stack, the path of its list.
        factor: Size after, divided by size before; a change that the number of elements explains is left out.
        before, after: The RMS before and after.
        tensor: Description of the tensor after.
        blocks: For a stack, the number of its blocks; else 1.
    """

    direction: Direction
    kind: Literal["block", "inside", "own code", "stack"]
    path: str
    number: int
    factor: float
    before: float
    after: float
    tensor: str
    blocks: int = 1


def factor(after: float, before: float, more: float) -> float:
    """Return the factor between two RMS values, without what the number of elements explains.

    A mean over n elements divides a gradient by n, a broadcast to n elements multiplies it by up to n, and both are
    harmless. So of `after / before` times any power from 0 to 1 of `more`, the value nearest to 1 is returned.

    Args:
        after: RMS of the tensor after, above 0.
        before: RMS of the tensor before, above 0.
        more: Elements of the tensor after, divided by those of the tensor before.
    """
    plain = after / before
    other = plain * more
    if plain > 1 and other > 1:
        return min(plain, other)
    return max(plain, other) if plain < 1 and other < 1 else 1.0


def changes(step: Step) -> list[Change]:
    """Return the changes of one step: every call of a block forward and backward, and the operations between them."""
    gradients = _Gradients(step)
    return [*_blocks(step, gradients), *_own_code(step), *_stacks(step, gradients)]


def stream(passage: Passage, step: Step, gradients: _Gradients | None = None) -> tuple[Event, Event] | None:
    """Return the input and the output of a call that carry the signal; None if it has no such pair.

    Args:
        passage: The call.
        step: Its step.
        gradients: If given, only tensors with a gradient count.
    """

    def usable(indices: list[int]) -> list[Event]:
        events = [step.events[i] for i in indices]
        return [e for e in events if e.size > 1 and (gradients is None or gradients.of(e) is not None)]

    outputs = usable(passage.outputs)
    inputs = [e for e in usable(passage.inputs) if e.dtype.is_floating_point]
    if not outputs or not inputs:
        return None
    out = outputs[0]  # others are attention weights, caches, router logits
    alike = [e for e in inputs if e.shape == out.shape]
    return (alike[0] if alike else max(inputs, key=lambda e: e.size)), out


class _Gradients:
    """The gradients of a step, by the tensor that they belong to."""

    def __init__(self, step: Step) -> None:
        self._by_event: dict[int, Event] = {}
        self._by_place: dict[tuple[str, str, str, int], Event] = {}
        for event in step.of("backward"):
            if event.forward is not None:
                self._by_event.setdefault(event.forward, event)
            else:  # recomputed under checkpointing
                self._by_place.setdefault((event.module, event.role, event.name, event.number), event)

    def of(self, event: Event) -> Event | None:
        """Return the gradient of a tensor; None if it has none."""
        found = self._by_event.get(event.index)
        return found or self._by_place.get((event.module, event.role, event.name, event.number))


def _blocks(step: Step, gradients: _Gradients) -> Iterator[Change]:
    inner = _inner(step)
    for passage in step.passages:
        if passage.path not in step.blocks:
            continue
        if (pair := stream(passage, step)) is not None:
            before, after = pair
            yield from _change("forward", "block", passage, before, after)
        if (pair := stream(passage, step, gradients)) is not None:
            given, made = gradients.of(pair[1]), gradients.of(pair[0])
            if given is not None and made is not None:
                yield from _change("backward", "block", passage, given, made)
        ends = [g for i in passage.outputs if (g := gradients.of(step.events[i])) is not None and sound(g)]
        within = [e for e in inner.get((passage.path, passage.number), []) if sound(e)]
        if ends and within:
            end = max(ends, key=lambda e: e.rms)
            top = max(within, key=partial(_between, before=end))
            yield from _change("backward", "inside", passage, end, top)


def _inner(step: Step) -> dict[tuple[str, int], list[Event]]:
    """Return the gradients of tensors that were made inside each call of a block."""
    found: dict[tuple[str, int], list[Event]] = {}
    for event in step.of("backward"):
        within = step.events[event.forward].within if event.forward is not None else None
        if within is not None:
            found.setdefault(within, []).append(event)
    return found


def _own_code(step: Step) -> Iterator[Change]:
    regions: dict[tuple[str, int, int], list[Operation]] = {}
    for operation in step.own_code:
        regions.setdefault((operation.path, operation.number, operation.region), []).append(operation)
    for (path, number, _), listed in regions.items():
        passage = Passage(path, number)
        first = listed[0].given  # the backward pass comes to the last operation first
        if not sound(first):
            continue
        # what is summed over rows or elements on the way, such as the gradient of a mean square, has another unit
        made = [
            (e, out)
            for o in listed
            for e, out in zip(o.made, o.leaving, strict=True)
            if sound(e) and e.size >= first.size
        ]
        leaving = [(e, out) for e, out in made if out and path not in step.blocks]
        for most, wanted in ((max, made), (min, leaving)):
            if wanted:
                top = most((e for e, _ in wanted), key=lambda e: _between(e, first))
                yield from _change("backward", "own code", passage, first, top)


def _stacks(step: Step, gradients: _Gradients) -> Iterator[Change]:
    """Yield the change over all blocks of a list, if they are eight or more and run one after the other."""
    lists: dict[str, list[Passage]] = {}
    for passage in step.passages:
        if passage.path in step.blocks and passage.path.rpartition(".")[2].isdecimal():
            lists.setdefault(passage.path.rpartition(".")[0], []).append(passage)
    for path, passages in lists.items():
        if len(passages) < 8:
            continue
        whole = Passage(path, 0)
        first, last = stream(passages[0], step), stream(passages[-1], step)
        if first is None or last is None:
            continue
        yield from _change("forward", "stack", whole, first[0], last[1], len(passages))
        given, made = gradients.of(last[1]), gradients.of(first[0])
        if given is not None and made is not None:
            yield from _change("backward", "stack", whole, given, made, len(passages))


def _change(
    direction: Direction,
    kind: Literal["block", "inside", "own code", "stack"],
    passage: Passage,
    before: Event,
    after: Event,
    blocks: int = 1,
) -> Iterable[Change]:
    if not (sound(before) and sound(after)):
        return ()
    tensor = f"{after.label} of {after.module or 'the model'}"
    now = _between(after, before)
    found = Change(direction, kind, passage.path, passage.number, now, before.rms, after.rms, tensor, blocks)
    return (found,)


def _between(after: Event, before: Event) -> float:
    return factor(after.rms, before.rms, after.size / before.size)


def sound(event: Event) -> bool:
    """True if a tensor can be compared: every value is finite, its RMS is not 0, and it was measured in time."""
    return event.nonfinite == 0 and event.rms > 0 and not event.late
