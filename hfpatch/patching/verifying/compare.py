"""Runs a model on a batch as it is and in other dtypes, and compares with float32 with the same weights."""

from __future__ import annotations

import contextlib
import math
import re
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hfpatch.compat.modules import parameters
from hfpatch.compat.quantising.quantised import coded
from hfpatch.errors import InputError
from hfpatch.given import shown
from hfpatch.model.evaluating.as_trained import as_trained
from hfpatch.model.evaluating.full_float32 import full_float32, not_in_full
from hfpatch.model.rebuilt import HALF, Buffer, as_loaded, floating_buffers, main_dtype
from hfpatch.model.survey import Survey
from hfpatch.numerics.autocast import autocast_as
from hfpatch.patching.arguments import Names
from hfpatch.patching.record import Record
from hfpatch.patching.verifying.answer import Answer, Batch, answer, compared, prepared, score
from hfpatch.patching.verifying.figures import Figures, LossChange, Proof, number
from hfpatch.patching.verifying.lending import (
    CastsSeen,
    Place,
    as_it_was,
    at_each_block,
    blocks_of,
    buffers_as,
    can_be_cast,
    parts_cast_their_input,
    weights_as,
)
from hfpatch.patching.writing import suspended
from hfpatch.report.progress import patience

SAME = ("exact", "equivalent")
"""Effects of edits that compute the same function as before."""

REFERENCE, AS_LOADED = "float32 (reference)", "as loaded with dtype="
LOST = ("rounded", "uninitialised")
"""States of buffers whose float32 values are recomputed for the reference."""
NAMED = 4
"""Number of places that a note names."""

_DTYPES = re.compile(r"d?type", re.IGNORECASE)
TIMED = 3
"""Number of timed steps, after one warm-up step."""


@dataclass(frozen=True)
class Edited:
    """An edit that the model carries, with its effect on this model."""

    module: nn.Module
    record: Record
    effect: str


@dataclass(frozen=True)
class Way:
    """A way to run the model: one row of the result.

    Attributes:
        name: Name of the row.
        weights: Dtype of the weights; None leaves them as they are, and then the caller's autocast region applies.
        autocast: Dtype of an autocast region; None for no autocast.
        bare: True if exact and equivalent edits are suspended.
        buffers: `as they are`, `exact` (float32), or `loaded` (as `from_pretrained(dtype=)` leaves them).
    """

    name: str
    weights: torch.dtype | None = None
    autocast: torch.dtype | None = None
    bare: bool = True
    buffers: str = "loaded"


EXACT = Way(REFERENCE, torch.float32, buffers="exact")
STOCK = (
    Way("float16 weights", torch.float16),
    Way("bfloat16 weights", torch.bfloat16),
    Way("bfloat16 weights, float16 autocast", torch.bfloat16, torch.float16),
    Way("float32 weights, float16 autocast", torch.float32, torch.float16),
)
"""Stock ways to run a model on half-precision hardware."""


def compare(model: nn.Module, batch: Any, edits: Sequence[Edited], runs: Names = None) -> Proof:
    """Run a model on a batch in several ways. Afterwards it is as before: patches, training mode and weights.

    Args:
        model: The model.
        batch: Its keyword arguments.
        edits: The edits to measure. Exact and equivalent ones are suspended for the reference; others stay in place.
        runs: Names of the rows to run; None for all.

    Raises:
        InputError: The batch does not run in float32, the model returns no logits, or there is no such row.
    """
    ready = prepared(model, batch)
    survey = Survey(model)
    bare = [e for e in edits if e.effect in SAME]
    with suspended(model, [(e.module, e.record) for e in bare]):  # as the reference has them
        buffers = floating_buffers(survey)
    wanted = _chosen(_ways(survey, buffers, edits), runs)
    bench = _Bench(model, survey, ready, buffers, tuple((e.module, e.record) for e in bare))
    tick = patience("verify")
    notes = list(filter(None, [ready.note]))
    with uncompiled(survey) as said, torch.no_grad():
        exact, bench, seen = _reference(bench, tick)
        notes += [*said, *seen]
        rows: list[Figures] = []
        for at, way in enumerate(wanted):
            rows.append(_row(bench, way, exact, lambda at=at, way=way: tick(_where(way, at, wanted)), notes))
        changes = _changes(bench, edits, rows, tick)
    reference = score(REFERENCE, exact, exact, ready.real)
    notes += [*_on_figures(reference, rows, exact, ready), *_on_buffers(buffers), *_on_weights(model)]
    notes += not_in_full(model)
    return Proof(reference, tuple(rows), tuple(dict.fromkeys(notes)), changes, type(model).__name__)


def _ways(survey: Survey, buffers: Iterable[Buffer], edits: Sequence[Edited]) -> list[Way]:
    """Return all rows that this model can have."""
    rounded = any(b.state in LOST for b in buffers)
    loaded = [Way(AS_LOADED, bare=False)] if rounded else []
    if not edits:
        stock = [w for w in STOCK if w.autocast or w.weights != main_dtype(survey.root) or rounded]
        return [Way("as it is", bare=False, buffers="as they are"), *loaded, *stock]
    before = [Way("before", buffers="as they are")] if any(e.effect in SAME for e in edits) else []
    return [*before, Way("after", bare=False, buffers="as they are"), *loaded, *STOCK[1:]]


def _chosen(ways: list[Way], runs: Names) -> list[Way]:
    if runs is None:
        return ways
    wanted: Any = [runs] if isinstance(runs, str) else runs
    if not isinstance(wanted, (list, tuple, set, frozenset)) or not all(isinstance(n, str) for n in wanted):  # pyright: ignore[reportUnknownVariableType]
        raise InputError(f"runs= must be a name or names of rows, got {shown(runs)}")
    known = [w.name for w in ways]
    if unknown := [n for n in wanted if n not in (REFERENCE, *known)]:  # pyright: ignore[reportUnknownVariableType]
        raise InputError(f"runs={unknown[0]!r}: no such row for this model; there are: {'; '.join(known)}")
    return [w for w in ways if w.name in wanted]


@dataclass(frozen=True)
class _Bench:
    """The data that all runs of one verification share.

    Attributes:
        model: The model.
        survey: Of the model.
        batch: Its input.
        buffers: Its floating-point buffers.
        bare: The exact and equivalent edits, which are suspended in most runs.
        whole: True if all weights are cast for the whole run, not block by block.
        by_hand: True if the inputs of parts are cast to the dtype of their weights.
    """

    model: nn.Module
    survey: Survey
    batch: Batch
    buffers: tuple[Buffer, ...]
    bare: tuple[tuple[nn.Module, Record], ...]
    whole: bool = False
    by_hand: bool = False

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def values(self, way: Way) -> dict[Place, torch.Tensor]:
        """Return other values for a run's rounded or uninitialised buffers; all others keep their values."""
        if way.buffers == "as they are":
            return {}
        lost = {(b.path, b.name): b.exact for b in self.buffers if b.state in LOST and b.exact is not None}
        if way.buffers == "exact" or not lost:
            return lost
        loaded = self.survey.once(("as loaded", way.weights), lambda: as_loaded(self.survey, way.weights))
        return {place: loaded[place] for place in lost if place in loaded}

    def run(self, way: Way, off: Sequence[tuple[nn.Module, Record]] = ()) -> tuple[Answer, dict[str, Any]]:
        """Return the output of one run; with time and memory, if the model runs as it is on a GPU."""
        inputs = self.batch.inputs if way.weights is None else _cast_floats(self.batch.inputs, way.weights)
        with contextlib.ExitStack() as stack:
            stack.enter_context(suspended(self.model, [*off, *(self.bare if way.bare else ())]))
            stack.enter_context(as_it_was(self.model))
            if way is EXACT:  # a reference in which adapters count, whatever evaluation makes of them
                stack.enter_context(as_trained(self.model))
                stack.enter_context(full_float32(self.model))
            if way.weights is not None:
                stack.enter_context(weights_as(self.model, way.weights, whole=self.whole))
                stack.enter_context(autocast_as(self.device.type, way.autocast))
            stack.enter_context(buffers_as(self.model, self.values(way)))
            if self.by_hand and way.weights is not None:
                stack.enter_context(parts_cast_their_input(self.model))
            return _measured(lambda: answer(self.model, inputs), self.device if way.weights is None else None)


def _attempt(bench: _Bench, way: Way) -> tuple[Answer, dict[str, Any], bool]:
    """Return the output, its cost, and True if the inputs of parts had to be cast to the dtype of their weights."""
    try:
        return *bench.run(way), bench.by_hand
    except (RuntimeError, InputError) as error:
        if bench.by_hand or way.weights is None or not _DTYPES.search(str(error)):
            raise
    return *replace(bench, by_hand=True).run(way), True


def _reference(bench: _Bench, tick: Callable[[str], None]) -> tuple[Answer, _Bench, list[str]]:
    """Return the output in float32, the settings for the other runs, and notes."""
    casts = CastsSeen()
    try:
        with casts, _ticking(bench, lambda: tick(REFERENCE)):
            exact, _, by_hand = _attempt(bench, EXACT)
            if not bool(exact.logits.isfinite().all()):
                entire = replace(bench, whole=True, by_hand=by_hand)
                again = entire.run(EXACT)[0]
                if bool(again.logits.isfinite().all()):
                    notes = ["the model reads weights of its layers from outside these layers: all were cast at once"]
                    return again, entire, [*notes, *_on_casts(casts, by_hand)]
    except RuntimeError as error:
        raise InputError(
            f"{type(bench.model).__name__} does not run in float32 on this batch, so there is no reference: "
            f"{_line(error)}"
        ) from error
    return exact, replace(bench, by_hand=by_hand), _on_casts(casts, by_hand)


def _row(bench: _Bench, way: Way, exact: Answer, tick: Callable[[], None], notes: list[str]) -> Figures:
    try:
        with _ticking(bench, tick):
            found, cost, by_hand = _attempt(bench, way)
    except (RuntimeError, InputError) as error:  # this model's code does not accept the dtype
        notes.append(f"{way.name}: does not run here ({_line(error)})")
        return Figures(way.name, None, math.nan, 0.0, finite=False)
    if by_hand and not bench.by_hand:
        notes.append(f"{way.name}: the input of each part is cast to the dtype of its weights, or it would not run")
    return replace(score(way.name, found, exact, bench.batch.real), **cost)


def _changes(
    bench: _Bench, edits: Sequence[Edited], rows: Sequence[Figures], tick: Callable[[str], None]
) -> tuple[LossChange, ...]:
    """Return the loss with and without each patch that changes the function; the model is otherwise as it is."""
    by_patch: dict[str, list[Edited]] = {}
    for edit in edits:
        if edit.effect not in SAME:
            by_patch.setdefault(edit.record.patch, []).append(edit)
    after = Way("after", bare=False, buffers="as they are")
    known = next((r for r in rows if r.name == after.name), None)
    found: list[LossChange] = []
    for patch, mine in by_patch.items():
        with _ticking(bench, lambda patch=patch: tick(f"without {patch}")):
            now = known.loss if known is not None else _loss(bench, after, ())
            was = _loss(bench, after, [(e.module, e.record) for e in mine])
        effects = ", ".join(dict.fromkeys(e.effect for e in mine))
        found.append(LossChange(patch, effects, was, now))
    return tuple(found)


def _loss(bench: _Bench, way: Way, off: Sequence[tuple[nn.Module, Record]]) -> float | None:
    try:
        loss = bench.run(way, off)[0].loss
    except (RuntimeError, InputError):  # it runs only with the patch
        return None
    return None if loss is None else float(loss)


@contextlib.contextmanager
def uncompiled(survey: Survey) -> Generator[list[str]]:
    """Run a compiled model uncompiled, because its code would ignore new hooks. Yields notes about it."""
    if not survey.compiled:
        yield []
        return
    with torch.compiler.set_stance("force_eager"):
        yield [f"{survey.compiled[0] or 'the model'} is compiled; every row is a run without the compiler"]


@contextlib.contextmanager
def _ticking(bench: _Bench, tick: Callable[[], None]) -> Generator[None]:
    """Call a function at each block, or at each module if there are no blocks."""
    with at_each_block(blocks_of(bench.survey) or bench.survey.modules.values(), tick):
        yield


def _where(way: Way, at: int, ways: Sequence[Way]) -> str:
    return f"row {at + 2} of {len(ways) + 1}, {way.name}"


def _measured(call: Callable[[], Answer], device: torch.device | None) -> tuple[Answer, dict[str, Any]]:
    if device is None or device.type != "cuda":
        return call(), {}
    found = call()
    times: list[float] = []
    torch.cuda.synchronize(device)
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(TIMED):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return found, {
        "seconds": statistics.median(times),
        "memory": torch.cuda.max_memory_allocated(device) - held,
    }


def _cast_floats(inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


def _line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _on_casts(casts: CastsSeen, by_hand: bool) -> list[str]:
    """Return notes about casts in the model's own code."""
    where = _listed(f"{place} ({count} times)" if count > 1 else place for place, count in casts.places.items())
    stayed = f"casts to half precision in the model's own code stayed, in float32 too: {where}" if where else ""
    fed = "in other dtypes, the input of each part is cast to the dtype of its weights; the model's own casts stayed"
    return list(filter(None, [fed if by_hand else "", stayed]))


def _on_figures(reference: Figures, rows: Sequence[Figures], exact: Answer, ready: Batch) -> list[str]:
    count = compared(exact.logits, ready.real)
    unit = "token" if exact.logits.shape[1] > 1 else "row"
    notes = [f"{count} {unit}{'s' if count != 1 else ''} compared; KL in nats per {unit}; the loss is the model's own"]
    if not reference.finite:
        notes.append("float32 itself is not finite on this batch, so KL and top-1 are meaningless")
    if reference.auxiliary is not None:
        notes.append(f"the experts' auxiliary loss is {number(reference.auxiliary)} in float32, before its coefficient")
    if any(r.loss is not None and not math.isfinite(r.loss) and r.finite for r in rows) and reference.loss is not None:
        notes.append("a non-finite loss over finite logits comes from the model's own loss, or all labels are -100")
    if any(r.seconds is not None for r in rows):
        notes.append("time and memory are measured only for rows that run the model as it is; the others cast weights")
    return notes


def _on_buffers(buffers: Sequence[Buffer]) -> list[str]:
    """Return notes about buffers in half precision: which ones the reference has in float32, and which it cannot."""
    notes: list[str] = []
    rounded = [b for b in buffers if b.state == "rounded"]
    if rounded:
        notes.append(
            f"{_places(rounded)}: rounded to half precision, and in no checkpoint; float32 in the reference, and as "
            f"from_pretrained leaves them in {AS_LOADED!r}"
        )
    never = [b for b in buffers if b.state == "uninitialised"]
    if never:
        notes.append(
            f"{_places(never)}: memory that was never written, and in no checkpoint; recomputed in the reference, "
            f"and as from_pretrained leaves them in {AS_LOADED!r}"
        )
    lost = [b for b in buffers if b.state == "changed" and b.value.dtype in HALF]
    if lost:
        notes.append(f"{_places(lost)}: in half precision and cannot be rebuilt, so no figure shows that error")
    stored = [b for b in buffers if b.state == "persistent" and b.value.dtype in HALF]
    if stored:
        notes.append(f"{_places(stored)}: stored with the weights in half precision, which the reference uses too")
    return notes


def _places(buffers: Iterable[Buffer]) -> str:
    """Return the number of buffers and their names."""
    found = list(buffers)
    return f"{len(found)} buffer{'s' if len(found) > 1 else ''} ({_listed(dict.fromkeys(b.place for b in found))})"


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    more = f", and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f"{', '.join(found[:NAMED])}{more}"


def _on_weights(model: nn.Module) -> list[str]:
    notes: list[str] = []
    found = [(parameters(module)[known.name], known.kind) for module in model.modules() if (known := coded(module))]
    packed = {id(parameter): kind for parameter, kind in found}
    if packed:
        what = f"{len(packed)} quantised weights ({', '.join(dict.fromkeys(packed.values()))})"
        notes.append(f"{what} are unpacked to float32 in the reference, and run as they are in every other row")
    other = sum(not can_be_cast(p) and id(p) not in packed for p in model.parameters())
    if other:
        notes.append(
            f"{other} quantised weights run as they are in every row, the reference too: if they compute in half "
            "precision, so does it"
        )
    if any(p.dtype in HALF for p in model.parameters()):
        notes.append("the reference has the same rounded weights, so no figure shows the error of rounding them")
    return notes
