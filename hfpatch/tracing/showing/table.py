"""A trace as a table and as plain values."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from hfpatch.dtypes import dtype_name
from hfpatch.report.sheet import Sheet
from hfpatch.tracing.events import Event, Phase, Step
from hfpatch.tracing.finding import Finding
from hfpatch.tracing.watched import Places


def sheet(
    title: str,
    steps: Sequence[Step],
    where: Places,
    findings: Sequence[Finding],
    intentional: Sequence[str],
    more: Sequence[str],
) -> Sheet:
    """Return a table with one row per block, in the order in which they ran, and for each stage that made a tensor.

    Args:
        title: Its title.
        steps: The traced steps; figures are the largest over them.
        where: The model's modules.
        findings: What was found.
        intentional: What is not finite on purpose.
        more: Notes at the end: the trend, what to try.
    """
    starts = {where.enclosing(f.module) for f in findings}
    backward = any(step.of("backward") for step in steps)
    rows: list[tuple[str, ...]] = []
    forth, back_again = tensors(steps, "forward"), tensors(steps, "backward")
    for path in ran(steps, where):
        there, back = forth.get(path, []), back_again.get(path, [])
        if there or back:
            word = "starts here" if path in starts else "not finite" if any(e.bad for e in (*there, *back)) else ""
            cells = (path or "(model)", _rms(there), _largest(there), _room(there))
            rows.append((*cells, _rms(back), _largest(back), word) if backward else (*cells, word))
    columns = ("block", "RMS", "max |x|", "room", *(("RMS grad", "max |grad|") if backward else ()), "")
    notes = [f"{'ordinary: ' if f.ordinary else ''}{f.sentence}" for f in findings[:5]]
    if len(findings) > 5:
        notes.append(f"... and in {len(findings) - 5} more steps.")
    if not findings:
        notes.append("Nothing went wrong." if steps else "The model was not called while it was traced.")
    notes += [
        f"step {s.number}: a backward pass ran after the step was over and was not traced (the model was called again "
        "or the trace was read before it, or it was a second backward pass)"
        for s in steps
        if s.unseen
    ][:3]
    notes += [f"intentional: {words}" for words in intentional[:5]]
    notes += ["room: doublings left before the largest value of the dtype"] if rows else []
    notes += more
    unmarked = frozenset(i for i, row in enumerate(rows) if not row[-1])
    return Sheet(title, columns, tuple(rows), tuple(notes), wide=("block",), folded=unmarked)


def to_dict(steps: Sequence[Step], findings: Sequence[Finding], intentional: Sequence[str]) -> dict[str, Any]:
    """Return plain values under stable keys; every number is a JSON number or null."""
    return {
        "findings": [f.to_dict() for f in findings],
        "intentional": list(intentional),
        "steps": [
            {"step": s.number, "epoch": s.epoch, "scale": s.scale, "tensors": [_tensor(e) for e in s.events]}
            for s in steps
        ],
    }


def ran(steps: Sequence[Step], where: Places) -> list[str]:
    """Return the paths of blocks, and of the stages that made a tensor of their own, in the order they returned.

    What did not return, because an error was raised in it, comes last.
    """
    order: dict[str, None] = {}
    for step in steps:
        made = {e.module for e in step.of("forward") if e.role == "output"}
        shown = [
            p for p in step.passages if p.path in where.blocks or not p.path or p.path in made & where.containers.keys()
        ]
        for passage in sorted(shown, key=lambda p: p.returned if p.returned >= 0 else math.inf):
            order.setdefault(passage.path)
    return list(order)


def tensors(steps: Sequence[Step], phase: Phase) -> dict[str, list[Event]]:
    """Return what each module returned, or the gradients of it, by path; of a module without any, all its tensors."""
    found: dict[str, list[Event]] = defaultdict(list)
    others: dict[str, list[Event]] = defaultdict(list)
    for step in steps:
        events = {e.index if phase == "forward" else e.forward: e for e in reversed(step.of(phase))}
        for passage in step.passages:
            found[passage.path] += [events[i] for i in passage.outputs if i in events]
        for event in step.of(phase):
            others[event.module].append(event)
            if phase == "backward" and event.forward is None and event.role == "output":  # recomputed
                found[event.module].append(event)
    return {path: found.get(path) or others[path] for path in found.keys() | others.keys()}


def _largest(events: list[Event]) -> str:
    values = [e.stats.largest for e in events if e.stats.least is not None]
    return f"{max(values):.4g}" if values else "-"


def _rms(events: list[Event]) -> str:
    values = [e.stats.rms for e in events if e.stats.least is not None]
    return f"{max(values):.4g}" if values else "-"


def _room(events: list[Event]) -> str:
    """Return the doublings left before the dtype overflows."""
    rooms = [math.log2(float(torch.finfo(e.dtype).max) / e.stats.largest) for e in events if e.stats.largest > 0]
    return f"{min(rooms):.1f}" if rooms else "-"


def _tensor(event: Event) -> dict[str, Any]:
    stats = event.stats
    return {
        "phase": event.phase,
        "module": event.module,
        "role": event.role,
        "name": event.name,
        "call": event.number,
        "dtype": dtype_name(event.dtype),
        "shape": list(event.shape),
        "nan": stats.nan,
        "posinf": stats.posinf,
        "neginf": stats.neginf,
        "min": stats.least,
        "max": stats.most,
        "largest": stats.largest,
        "mean": stats.mean,
        "rms": stats.rms,
        "zeros": stats.zeros,
        "under": stats.under,
        "counted": stats.counted,
    }
