"""A trace as a table, as plain values and as a heat map."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from hfpatch.dtypes import dtype_name
from hfpatch.report.grid import Cell
from hfpatch.report.heatmap import Heatmap
from hfpatch.report.sheet import Sheet
from hfpatch.tracing.events import Event, Phase, Step
from hfpatch.tracing.finding import Finding
from hfpatch.tracing.watched import Places


def sheet(
    title: str,
    steps: Sequence[Step],
    where: Places,
    findings: Sequence[Finding],
    meant: Sequence[str],
    answers: Sequence[str],
) -> Sheet:
    """One row a block: the largest magnitude forward and backward, how many doublings are left, what is not finite."""
    starts = {where.kept(f.module) for f in findings}
    backward = any(step.of("backward") for step in steps)
    rows: list[tuple[str, ...]] = []
    forth, back_again = _by_module(steps, "forward"), _by_module(steps, "backward")
    for path in _blocks(steps, where):
        there, back = _own(forth, path), _own(back_again, path)
        if there or back:
            word = "starts here" if path in starts else "not finite" if any(e.bad for e in (*there, *back)) else ""
            cells = (path or "(model)", _largest(there), _room(there))
            rows.append((*cells, _largest(back), _room(back), word) if backward else (*cells, word))
    columns = ("block", "max |x|", "room", *(("max |grad|", "room ") if backward else ()), "")
    rows = _folded(rows)
    notes = [f"{'ordinary: ' if f.ordinary else ''}{f.sentence}" for f in findings[:5]]
    if len(findings) > 5:
        notes.append(f"... and in {len(findings) - 5} more steps.")
    if not findings:
        notes.append("Nothing went wrong." if steps else "The model was not called while it was traced.")
    notes += [
        f"step {s.number}: a backward pass came after the step was over, and was not seen (the model was called again "
        "before it, or it was the second one)"
        for s in steps
        if s.unseen
    ][:3]
    notes += [f"meant: {words}" for words in meant[:5]]
    notes += ["room: doublings left before the largest value of the dtype"] if rows else []
    notes += answers
    return Sheet(title, columns, tuple(rows), tuple(notes), wide=("block",))


def _folded(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows with runs of three and more that are not finite in one line."""
    out: list[tuple[str, ...]] = []
    for same, group in itertools.groupby(rows, key=lambda row: row[-1] == "not finite"):
        run = list(group)
        if same and len(run) > 2:
            out.append((f"{run[0][0]} to {run[-1][0]}", *[""] * (len(run[0]) - 2), "not finite"))
        else:
            out += run
    return out


def to_dict(steps: Sequence[Step], findings: Sequence[Finding], meant: Sequence[str]) -> dict[str, Any]:
    """Stable keys; every number a JSON number or null."""
    return {
        "findings": [f.to_dict() for f in findings],
        "meant": list(meant),
        "steps": [
            {"step": s.number, "epoch": s.epoch, "scale": s.scale, "tensors": [_tensor(e) for e in s.events]}
            for s in steps
        ],
    }


def heatmap(
    title: str, steps: Sequence[Step], where: Places, findings: Sequence[Finding], notes: Sequence[str]
) -> Heatmap:
    """Blocks by steps, a column each for the forward and the backward pass."""
    rows = _blocks(steps, where)
    columns: list[str] = []
    cells: dict[tuple[int, int], Cell] = {}
    first_bad = None
    start = findings[0] if findings else None
    passes: tuple[tuple[Phase, str], ...] = (("forward", ""), ("backward", " backward"))
    for phase, suffix in passes:
        for step in steps:
            if not (events := step.of(phase)):
                continue
            columns.append(f"{f'epoch {step.epoch}, ' if step.epoch else ''}step {step.number}{suffix}")
            own = _by_module([step], phase)
            held: dict[str | None, list[Event]] = defaultdict(list)
            for event in events:
                held[where.kept(event.module)].append(event)
            for index, path in enumerate(rows):
                here, inner = _own(own, path), held[path]
                if not inner:
                    continue
                place = (index, len(columns) - 1)
                cells[place] = _cell(here or inner, inner)
                if start and _meets(start, step, phase) and where.kept(start.module) == path:
                    first_bad = place
                    cells[place] = Cell(
                        cells[place].value, cells[place].limit, True, (*_cause(start), *cells[place].facts)
                    )
    return Heatmap(title, tuple(p or "(model)" for p in rows), tuple(columns), cells, first_bad, tuple(notes), ())


def _meets(finding: Finding, step: Step, phase: str) -> bool:
    forward = finding.phase in ("weights", "forward")
    return (finding.step, finding.epoch) == (step.number, step.epoch) and forward == (phase == "forward")


def _cause(finding: Finding) -> tuple[tuple[str, str], ...]:
    return (("operation", finding.operation or "not known"), ("why", finding.why), ("seen in", finding.tensor))


def _cell(shown: list[Event], inner: list[Event]) -> Cell:
    top = max(shown, key=lambda e: e.stats.largest)
    stats = top.stats
    bad = [e for e in inner if e.bad]
    facts = [
        ("tensor", f"{top.what} of {top.module or 'the model'}"),
        ("dtype", dtype_name(top.dtype)),
        ("shape", "x".join(map(str, top.shape)) or "scalar"),
        ("max |x|", f"{stats.largest:.6g}"),
        ("min, max", f"{_number(stats.least)}, {_number(stats.most)}"),
        ("mean, RMS", f"{stats.mean:.4g}, {stats.rms:.4g}"),
        ("zeros", f"{stats.zeros:.2%}"),
        *(("not finite", f"{e.what} of {e.module or 'the model'}: {e.stats.holds}") for e in bad[:3]),
    ]
    return Cell(
        stats.largest if stats.least is not None else None, float(torch.finfo(top.dtype).max), bool(bad), tuple(facts)
    )


def _blocks(steps: Sequence[Step], where: Places) -> list[str]:
    """Blocks, and the model itself at the end, in the order they returned."""
    order: dict[str, None] = {}
    for step in steps:
        for event in step.of("forward"):
            if event.role == "output" and (event.module in where.blocks or event.module == ""):
                order.setdefault(event.module)
    for step in steps:
        for event in step.events:
            if (path := where.kept(event.module)) is not None and path in where.blocks:
                order.setdefault(path)
    return list(order)


def _by_module(steps: Sequence[Step], phase: Phase) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = defaultdict(list)
    for step in steps:
        for event in step.of(phase):
            found[event.module].append(event)
    return found


def _own(events: dict[str, list[Event]], path: str) -> list[Event]:
    """Outputs of a module, or their gradients; its inputs' where it has no output of its own."""
    own = events.get(path, [])
    return [e for e in own if e.role == "output"] or own


def _largest(events: list[Event]) -> str:
    values = [e.stats.largest for e in events if e.stats.least is not None]
    return f"{max(values):.4g}" if values else "-"


def _room(events: list[Event]) -> str:
    """Doublings left before the dtype overflows."""
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


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
