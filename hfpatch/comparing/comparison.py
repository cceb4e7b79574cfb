"""The result of a comparison."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hfpatch.comparing.differing import Fact
from hfpatch.comparing.distance import LEAST, Distance
from hfpatch.comparing.runs import Unequal
from hfpatch.comparing.steps import Parting
from hfpatch.comparing.weights import Weight
from hfpatch.model.walk import starred
from hfpatch.report import Sheet, Shown

ROWS = 8
"""Number of places, and of facts, that a table has."""


@dataclass(frozen=True)
class Place:
    """A place where B is not bit for bit A, on the values of A.

    Attributes:
        unequal: The place.
        distance: How far B is from A there.
        verdict: `parts`, `below rounding` (another function, hidden by rounding), `rounding`, or `not measured`.
        cause: The facts with which B agrees there, once they are as in A; empty if none was found or tried.
        operation: The first operation that parts there; None where it was not looked for or not found.
    """

    unequal: Unequal
    distance: Distance
    verdict: str
    cause: tuple[Fact, ...] = ()
    operation: Parting | None = None

    @property
    def path(self) -> str:
        """Path of the block or container."""
        return self.unequal.key[0]

    @property
    def title(self) -> str:
        """The place in a few words."""
        path, number = self.unequal.key
        call = f", call {number + 1}" if number else ""
        names = ", ".join(n for n in self.unequal.names if n)
        if self.unequal.role == "input":
            return f"{names} passed to {path}{call}"
        if self.unequal.role == "result":
            return f"{names or 'the result'} of {path or 'the model'}, after its blocks{call}"
        return f"{path or 'the model'}{call}"

    def to_dict(self) -> dict[str, Any]:
        """Return the place for JSON; non-finite numbers become None."""
        d = self.distance
        sizes = {"difference": d.difference, "rounding": d.rounding, "in_float64": d.exact}
        return {
            "path": self.path,
            "call": self.unequal.key[1],
            "role": self.unequal.role,
            "tensors": list(self.unequal.names),
            "verdict": self.verdict,
            **{k: v if v is not None and math.isfinite(v) else None for k, v in sizes.items()},
            "cause": [f.to_dict() for f in self.cause],
            "operation": None if self.operation is None else self.operation.to_dict(),
        }


@dataclass(frozen=True)
class End:
    """The two models from end to end, each on its own values.

    Attributes:
        loss_a, loss_b: The loss of each; None if it returns none.
        kl: Mean KL divergence KL(A || B), in nats per token.
        top1: Share of tokens for which both have the same most likely token.
    """

    loss_a: float | None
    loss_b: float | None
    kl: float
    top1: float


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """Two models on one batch. True if they part by more than rounding explains.

    Attributes:
        a, b: Class and dtype of each.
        places: Where B is not bit for bit A, in the order in which A runs; where they part, first.
        compared: Number of calls of blocks that were compared.
        facts: What differs as the models stand, with what the run showed of it.
        weights: Every parameter and buffer, with its state.
        end: From end to end; None if B is bit for bit A, or returns no such logits.
        notes: What was not compared, and why.
    """

    a: str
    b: str
    places: tuple[Place, ...]
    compared: int
    facts: tuple[Fact, ...]
    weights: tuple[Weight, ...]
    end: End | None
    notes: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.parted)

    @property
    def parted(self) -> tuple[Place, ...]:
        """The places where they part by more than rounding explains, or where that could not be measured."""
        return tuple(p for p in self.places if p.verdict in ("parts", "not measured"))

    @property
    def unlike(self) -> tuple[Place, ...]:
        """The places whose results have another shape in B, so that they were not compared."""
        return tuple(p for p in self.places if p.verdict == "other shape")

    @property
    def first(self) -> Place | None:
        """The first of `parted`; None if there is none."""
        return next(iter(self.parted), None)

    @property
    def equal(self) -> bool:
        """True if every block and all code between them gave the same, bit for bit."""
        return not self.places and self.compared > 0

    @property
    def sentence(self) -> str:
        """What was found, in a sentence or two."""
        first = self.first
        hidden = [p for p in self.places if p.verdict == "below rounding"]
        if first is None and len(self.places) == len(self.unlike):
            rest = f"; not compared: {self.unlike[0].title}, {self.unlike[0].unequal.obstacle}" if self.unlike else ""
            if self.compared <= len(self.unlike):
                return f"nothing could be compared{rest.replace('not compared: ', '')}"
            calls = f"all {self.compared} calls of blocks" if not rest else "every call that can be compared"
            return f"B is A, bit for bit, in {calls} and in the code between them{rest}"
        if first is None and hidden:
            where = f"{hidden[0].title}{f' and {len(hidden) - 1} more places' if len(hidden) > 1 else ''}"
            d = hidden[0].distance
            return (
                f"B differs from A by no more than rounding explains, but computes another function in {where}: in "
                f"float64 it differs by {size(d.exact)} of its size, rounding there is {size(d.rounding)}"
            )
        if first is None:
            return f"B differs from A by no more than rounding explains, in {len(self.places)} places"
        d = first.distance
        if not math.isfinite(d.difference):
            return f"B parts from A in {first.title}: only one of them is finite there, or the masks differ"
        why = f"rounding explains {size(d.rounding)}" if d.rounding is not None else f"rounding not measured ({d.why})"
        return f"B parts from A in {first.title}: by {size(d.difference)} of its size; {why}"

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        counts = Counter(w.state for w in self.weights)
        return {
            "a": self.a,
            "b": self.b,
            "equal": self.equal,
            "parts": bool(self),
            "sentence": self.sentence,
            "places": [p.to_dict() for p in self.places],
            "compared": self.compared,
            "facts": [f.to_dict() for f in self.facts],
            "weights": {**dict(counts), "line": self.weights_line},
            "end": None if self.end is None else {k: _finite(v) for k, v in vars(self.end).items()},
            "notes": list(self.notes),
        }

    @property
    def weights_line(self) -> str:
        """Whether B has A's weights, in a line."""
        held = [w for w in self.weights if not w.buffer]
        both = [w for w in held if w.state not in ("only in A", "only in B")]
        equal = [w for w in both if w.state in ("equal", "rounded")]
        rounded = sum(w.state == "rounded" for w in both)
        line = f"weights: {len(equal)} of {len(both)} equal"
        if rounded:
            line += f" ({rounded} after rounding to the narrower dtype)"
        for state, words in (
            ("differs", "differ"),
            ("shape", "have another shape"),
            ("away", "not in memory, not compared"),
            ("only in A", "only in A"),
            ("only in B", "only in B"),
        ):
            some = [w for w in held if w.state == state]
            if some:
                verb = "differs" if words == "differ" and len(some) == 1 else words
                line += f"; {len(some)} {verb}{_where([w.full for w in some])}"
        buffers = [w for w in self.weights if w.buffer]
        same, cast = (sum(w.state == state for w in buffers) for state in ("equal", "rounded"))
        line += f"; buffers: {same} of {len(buffers)} equal" if buffers else ""
        return f"{line}, {cast} rounded" if cast else line

    def sheet(self) -> Sheet:
        """Return the finding, the places that differ, and what was compared."""
        lines = [f"A: {self.a}. B: {self.b}.", f"{self.sentence}."]
        first = self.first
        if first is not None:
            if first.operation is not None:
                lines.append(f"First operation: {first.operation.sentence}.")
            lines.append(_because(first, self.facts))
        shown = [p for p in self.places if p.verdict not in ("rounding", "other shape")][:ROWS]
        worst = max(
            (p for p in self.places if p.verdict == "rounding" and p.unequal.role == "output"),
            key=lambda p: p.distance.difference,
            default=None,
        )
        shown += [worst] if worst is not None else []
        rows = tuple(
            (p.title, size(p.distance.difference), size(p.distance.rounding), size(p.distance.exact), p.verdict)
            for p in shown
        )
        more = sum(p.verdict not in ("rounding", "other shape") for p in self.places) - ROWS
        notes = [self.weights_line]
        if more > 0:
            notes.insert(0, f"and {more} more places that part or compute another function")
        if self.end is not None:
            losses = ", ".join(
                f"loss {v:.6g} in {n}" for n, v in (("A", self.end.loss_a), ("B", self.end.loss_b)) if v is not None
            )
            kl = f"KL {self.end.kl:.2g} nats a token, top-1 {self.end.top1:.2%}"
            notes.append(f"end to end: {losses}{', ' if losses else ''}{kl}")
        notes += [f"not compared: {p.title}, {p.unequal.obstacle}" for p in self.unlike[:ROWS]]
        narrow = sorted({n for p in self.places for n in p.distance.narrow})
        if narrow:
            notes.append(f"{', '.join(narrow)} ran in float32 in the float64 reference: no float64 version")
        columns = ("place", "B from A", "rounding", "in float64", "")
        return Sheet("\n".join(lines), columns, rows, (*notes, *self.notes), wide=("place",))

    def sheets(self) -> tuple[Sheet, ...]:
        """Return the finding, and what differs as the models stand."""
        groups: dict[tuple[str, ...], list[Fact]] = {}
        for f in sorted(self.facts, key=lambda f: not f.tried):
            path = starred(f.path) if f.kind != "patch" else ""
            key = (f.kind, path, f.name, f.a, f.b, starred(f.effect))
            groups.setdefault(key, []).append(f)
        rows = [
            (
                f.kind,
                _places(found),
                f.a,
                f.b,
                _apart(found),
                f"{f.effect}{f' ({len(found)} of them)' if len(found) > 1 else ''}",
            )
            for found in groups.values()
            for f in found[:1]
        ]
        if not rows:
            return (self.sheet(),)
        rest = len(rows) - ROWS * 2
        notes = (f"and {rest} more kinds: see .facts",) if rest > 0 else ()
        wide = ("where", "in A", "in B", "what the run shows")
        columns = ("", "where", "in A", "in B", "apart", "what the run shows")
        return (self.sheet(), Sheet("What differs, as the models stand", columns, tuple(rows[: ROWS * 2]), notes, wide))


def _places(found: Sequence[Fact]) -> str:
    """Return where facts of one group lie."""
    first = found[0]
    if first.kind == "patch":
        return f"{first.name}, in {starred(first.path) or 'the model'}"
    return (starred(first.place) if len(found) > 1 else first.place) or "the model"


def _apart(found: Iterable[Fact]) -> str:
    far = [f.distance for f in found if f.distance is not None]
    return size(max(far)) if far else ""


def size(value: float | None) -> str:
    """Return a relative distance as text."""
    if value is None:
        return "-"
    return "0" if value == 0 else "not finite" if not math.isfinite(value) else f"{value:.1e}"


def _because(place: Place, facts: Iterable[Fact]) -> str:
    if place.cause:
        kinds = list(dict.fromkeys((f.kind, f.name) for f in place.cause))
        first = place.cause[0]
        what = (
            f"{first.kind} {first.place}"
            if first.kind not in ("mode", "attention")
            else f"{first.kind} of {first.path or 'the model'}"
        )
        values = f" ({first.a} in A, {first.b} in B)" if (first.a, first.b) != (first.b, first.a) else ""
        if first.distance is not None:
            values = f" (apart by {size(first.distance)} of its size)"
        more = f" and {len(place.cause) - 1} more" if len(place.cause) > 1 else ""
        them = "them" if len(place.cause) > 1 or len(kinds) > 1 else "it"
        return f"Cause, tried: {what}{values}{more}: with {them} as in A, B agrees with A there."
    d = place.distance
    if not math.isfinite(d.difference) and d.exact is not None and d.exact <= LEAST:
        return "Cause, tried: the dtype: in float64, from the same weights, B agrees with A there."
    if any(f.effect == "where they part" for f in facts):
        return "Cause: not shown. With what differs there (below) as in A, B still parts, or it cannot be tried."
    return "Cause: no weight, attribute, config value, class or mode differs there."


def _where(names: list[str]) -> str:
    """Return where names lie: the part that they have in common, or the first ones."""
    if len(names) == 1:
        return f" ({names[0]})"
    parts = [n.split(".")[:-1] for n in names]
    shared: list[str] = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    if shared:
        return f", all in {'.'.join(shared)}"
    return f" ({', '.join(names[:2])}, ...)" if len(names) > 2 else f" ({', '.join(names)})"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
