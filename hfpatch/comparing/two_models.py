"""`hfpatch.compare`: two models on one batch, and the first operation where they part."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hfpatch.comparing.causes import here, tried
from hfpatch.comparing.comparison import Comparison, End, Place
from hfpatch.comparing.differing import Fact, facts, with_effect
from hfpatch.comparing.distance import Distance, Exactly
from hfpatch.comparing.lined_up import NAMED, Pair, Side, lined_up
from hfpatch.comparing.runs import Record, Unequal, on_values_of, record
from hfpatch.comparing.steps import parting
from hfpatch.dtypes import dtype_name
from hfpatch.errors import InputError
from hfpatch.model.put_back import as_before
from hfpatch.model.rebuilt import main_dtype
from hfpatch.model.walk import inside
from hfpatch.patching.verifying.answer import answer, score
from hfpatch.patching.verifying.compare import uncompiled
from hfpatch.patching.verifying.lending import at_each_block
from hfpatch.report.progress import patience

MOST, FEW = 12, 3
"""Groups of facts that are tried alone at the first place that parts, and at later ones."""
EXAMINED = 8
"""Number of places that part for which causes are tried."""
PARTS = "where they part"
"""Said of a fact at a place that parts, which was not shown to be the cause."""
LIKELY = (
    "class",
    "eps",
    "buffer",
    "tie",
    "weight",
    "attribute",
    "dropout",
    "mode",
    "adapter",
    "patch",
    "attention",
    "config",
)
"""Kinds of facts, those first that change one module alone."""


def compare(a: object, b: object, batch: Mapping[str, Any]) -> Comparison:
    """Run two models on one batch and name the first operation where they part by more than rounding explains.

    Each block of B is run on the input of A's block, and code between the blocks on what A's blocks returned. Where B
    is not bit for bit A, both are run again in float64, which measures what rounding explains there. What differs as
    the models stand (weights, buffers, attributes such as eps, config, classes, modes, adapters, patches) is read, and
    at a place that parts it is tried: with A's value, B has to agree. Padding is left out. Each model runs in its own
    mode, with the same random numbers.

    To compare one model in two modes, dtypes or with and without a patch or adapter, pass a copy that shares the
    weights and change that: `b = copy.deepcopy(model, {id(p): p for p in model.parameters()})`, then `b.train()`,
    `hfpatch.revert(b)` or `b.set_attn_implementation("eager")`; for adapters, call this inside
    `with b.disable_adapter():`. (`.to(dtype)` needs a copy of its own weights, and so does undoing a patch that set
    weights.)

    Args:
        a: A module, wrapped or not, or an object whose `.model` is one (a Trainer).
        b: Another one, of the same architecture. Depth, vocabulary and wrappers may differ.
        batch: Keyword arguments of both models: `input_ids [batch, tokens]` and any others. A causal model without
            labels gets `input_ids`, without padding, as labels.

    Returns:
        Where they part and why, what differs without showing on this batch, and whether B has A's weights. True if they
        part. Prints as a table. Both models, their hooks, modes, buffers and every random state are as before.

    Raises:
        NotAModelError: `a` or `b` holds no torch module.
        InputError: They are one object, they have no block in common, or one of them does not run on the batch.
    """
    pair = lined_up(a, b, batch)
    tick = patience("compare")
    tick("reading weights")
    known = facts(pair)
    notes: list[str] = [n for s in (pair.a, pair.b) if (n := s.batch.note)][:1]
    with ExitStack() as stack:
        stack.enter_context(as_before(pair.a.given))
        stack.enter_context(as_before(pair.b.given))
        for side in (pair.a, pair.b):
            notes += stack.enter_context(uncompiled(side.survey))
            blocks = side.blocks().values()
            stack.enter_context(at_each_block(blocks, lambda side=side: tick(f"running {side.name}")))
        draw_again = _draws()
        ran = record(pair.a)
        draw_again()
        other = [f.path for f in known.found if f.kind == "attention"]
        theirs, unequal = on_values_of(ran, pair, lambda path: any(inside(p, path) for p in other))
        places = _examined(pair, ran, theirs, unequal, known.found, tick)
        end = None
        if places:
            end, why = _end(pair, draw_again)
            notes += why
    notes += [*_at_padding(places), *_not_compared(pair, ran, theirs)]
    called = sum(k in theirs.calls and theirs.calls[k].call is not None for k, s in ran.calls.items() if s.call)
    told = _effects(known.found, places, pair, ran)
    one, other = (f"{type(s.root).__name__}, {dtype_name(main_dtype(s.root))}, {_mode(s)}" for s in (pair.a, pair.b))
    return Comparison(one, other, tuple(places), called, tuple(told), known.weights, end, tuple(dict.fromkeys(notes)))


def _examined(
    pair: Pair,
    a: Record,
    b: Record,
    unequal: Sequence[Unequal],
    known: Sequence[Fact],
    tick: Callable[[str], None],
) -> list[Place]:
    """Return the places that differ, measured; for the first ones that part, with cause and operation."""
    exactly = Exactly(pair, a, b)
    places: list[Place] = []
    examined = 0
    for found in unequal:
        tick(f"measuring rounding in {found.key[0] or 'the model'}")
        distance = exactly.distance(found) if not found.obstacle else Distance(float("inf"))
        verdict = "other shape" if found.obstacle else distance.verdict
        place = Place(found, distance, verdict)
        if verdict in ("parts", "below rounding") and examined < EXAMINED and not found.obstacle:
            examined += 1
            likely = sorted(
                here(known, found, pair), key=lambda f: LIKELY.index(f.kind) if f.kind in LIKELY else len(LIKELY)
            )
            if not any(p.verdict == "parts" and p.operation for p in places):
                place = replace(place, operation=parting(exactly, found, distance))
                if place.operation is not None:
                    at, held = place.operation.path, _weights_of(place)
                    likely.sort(key=lambda f: (f.place not in held, f.path != at))
            alone = MOST if place.operation is not None else FEW
            place = replace(place, cause=tuple(tried(exactly, found, distance, likely, alone)))
        places.append(place)
    return places


def _weights_of(place: Place) -> set[str]:
    op = place.operation
    return {w for o in (op.a, op.b) if o is not None for w in o.weights} if op is not None else set()


def _effects(known: Sequence[Fact], places: Sequence[Place], pair: Pair, a: Record) -> list[Fact]:
    """Return the facts with what the run showed of them."""
    causes = {id(f): p for p in reversed(places) for f in p.cause}
    ran = {k[0] for k in a.calls}
    return [_effect(f, causes.get(id(f)), places, pair, ran) for f in known]


def _effect(fact: Fact, place: Place | None, places: Sequence[Place], pair: Pair, ran: set[str]) -> Fact:
    if place is not None:
        hidden = f"hidden by rounding ({place.distance.exact:.1e} in float64)" if place.distance.exact else ""
        shows = hidden if place.verdict == "below rounding" else "makes B part"
        return with_effect(fact, f"the cause, tried: {shows} in {place.title}", tried=True)
    block = next((p for p in (*pair.blocks, *pair.only_a, *pair.only_b) if inside(fact.path, p) and p), None)
    if fact.kind == "dtype":
        return with_effect(fact, "its rounding is measured")
    if fact.kind == "parts":
        return with_effect(fact, "not compared")
    if fact.kind in ("config", "mode") or block is None:
        parts = any(p.verdict == "parts" and (p.unequal.role != "output" or fact.kind == "mode") for p in places)
        return with_effect(fact, PARTS if parts else "no difference on this batch")
    if block not in ran or block not in pair.blocks:
        return with_effect(fact, "its block was not compared")
    found = [p for p in places if p.path == block and p.unequal.role == "output"]
    verdicts = {p.verdict for p in found}
    if "other shape" in verdicts:
        return with_effect(fact, "its block was not compared")
    if verdicts & {"parts", "not measured"}:
        return with_effect(fact, PARTS)
    if "below rounding" in verdicts:
        return with_effect(fact, "where rounding hides a difference")
    return with_effect(fact, "no more than rounding" if found else "no difference on this batch")


def _end(pair: Pair, draw_again: Callable[[], None]) -> tuple[End | None, list[str]]:
    """Return the figures from end to end, and why there are none."""
    try:
        with torch.no_grad():
            draw_again()
            exact = answer(pair.a.model, pair.a.batch.inputs)
            draw_again()
            mine = answer(pair.b.model, pair.b.batch.inputs)
    except InputError:
        return None, ["no logits were compared from end to end: a model returns none"]
    if mine.logits.shape != exact.logits.shape:
        shapes = f"{list(exact.logits.shape)} in A and {list(mine.logits.shape)} in B"
        return None, [f"logits were not compared from end to end: their shape is {shapes}"]
    moved = replace(mine, logits=mine.logits.to(exact.logits.device))
    figures = score("B", moved, exact, pair.a.batch.real)
    loss = None if exact.loss is None else float(exact.loss)
    return End(loss, figures.loss, figures.kl, figures.top1), []


def _at_padding(places: Sequence[Place]) -> list[str]:
    """Return a note about the first place that parts at padding alone."""
    for place in places:
        d = place.distance
        if (
            place.verdict == "rounding"
            and place.unequal.role == "output"
            and d.rounding is not None
            and d.padding > 10 * d.rounding + d.difference
        ):
            return [f"padding is left out: at its positions B is {d.padding:.1e} from A in {place.title}"]
    return []


def _not_compared(pair: Pair, a: Record, b: Record) -> list[str]:
    """Return notes about blocks that were not compared."""
    notes: list[str] = []
    for name, paths in (("A", pair.only_a), ("B", pair.only_b)):
        if paths:
            notes.append(f"not compared, only in {name}: {_named(paths)}")
    idle = [p for p in pair.blocks if (p, 0) not in a.calls and (p, 0) not in b.calls]
    if idle:
        notes.append(f"not called on this batch: {_named(idle)}")
    for name, mine, other in (("A", a, b), ("B", b, a)):
        extra = list(dict.fromkeys(k[0] for k in mine.calls if k not in other.calls and k[0] in pair.blocks))
        if extra:
            notes.append(f"called more often in {name}: {_named(extra)}")
    apart = list(dict.fromkeys(k[0] for k, s in b.calls.items() if k in a.calls and a.calls[k].call and s.call is None))
    if apart:
        notes.append(f"not compared, what they are passed has another shape: {_named(apart)}")
    return notes


def _named(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
    return f"{', '.join(p or 'the model' for p in paths[:NAMED])}{more}"


def _mode(side: Side) -> str:
    modes = {m.training for m in side.survey.modules.values()}
    return "training and evaluation mode" if len(modes) > 1 else "training mode" if True in modes else "evaluation mode"


def _draws() -> Callable[[], None]:
    """Return a function that puts every random state back to what it is now."""
    python, numbers, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cards = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def again() -> None:
        random.setstate(python)
        np.random.set_state(numbers)
        torch.set_rng_state(cpu)
        if cards:
            torch.cuda.set_rng_state_all(cards)

    return again
