"""The picture of a trace: a curve over the blocks of one step, a heat map of blocks by steps for several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from hfpatch.dtypes import dtype_name
from hfpatch.errors import InputError
from hfpatch.report.curve import Curve
from hfpatch.report.grid import Cell
from hfpatch.report.heatmap import Heatmap
from hfpatch.report.series import Line
from hfpatch.report.sheet import Sheet
from hfpatch.tracing.events import Event, Phase, Step
from hfpatch.tracing.finding import Finding
from hfpatch.tracing.showing.table import ran, tensors
from hfpatch.tracing.watched import Places

FORMATS = ("float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn")
PASSES: tuple[tuple[Phase, str], ...] = (("forward", ""), ("backward", " backward"))
DETAILED = 400
"""Most modules whose figures a page holds."""


def picture(
    title: str,
    steps: Sequence[Step],
    where: Places,
    findings: Sequence[Finding],
    notes: Sequence[str],
    dtype: str | torch.dtype | None,
) -> Curve | Heatmap:
    """Return the picture of some traced steps.

    Args:
        title: Its title.
        steps: The traced steps.
        where: The model's modules.
        findings: What was found; the first is marked.
        notes: Lines above the picture.
        dtype: The dtype for whose limit it is coloured, or whose limit is drawn; None for those of the tensors.

    Raises:
        InputError: Another dtype than those of `FORMATS`.
    """
    name = None if dtype is None else dtype_name(dtype)
    if name is not None and name not in FORMATS:
        raise InputError(f"the picture of a trace: dtype={name!r}: want one of {', '.join(FORMATS)}")
    if len(steps) == 1:
        return curve(title, steps[0], where, findings, notes, name)
    return heatmap(title, steps, where, findings, notes, name)


def curve(
    title: str, step: Step, where: Places, findings: Sequence[Finding], notes: Sequence[str], dtype: str | None = None
) -> Curve:
    """Return RMS and largest magnitude by block, forward and backward, with the limits of the dtypes as lines."""
    rows = ran([step], where)
    lines: list[Line] = []
    for phase, _ in PASSES:
        if not step.of(phase):
            continue
        found = tensors([step], phase)
        rms: list[float | None] = []
        largest: list[float | None] = []
        bad: list[bool] = []
        for path in rows:
            events = found.get(path, [])
            finite = [e for e in events if e.stats.least is not None]
            top = max(finite, key=lambda e: e.stats.largest, default=None)
            rms.append(top.stats.rms if top is not None else None)
            largest.append(top.stats.largest if top is not None else None)
            bad.append(any(e.bad for e in events))
        lines.append(Line(phase, tuple(rms), tuple(largest), tuple(bad)))
    names = dict.fromkeys(dtype_name(e.dtype) for e in step.of("forward") if e.dtype.is_floating_point)
    drawn = list(names) if dtype is None else [dtype]
    limits = tuple(
        limit for n in drawn for limit in ((f"largest of {n}", _limit(n)), (f"smallest of {n}", _smallest(n)))
    )
    mark = where.enclosing(findings[0].module) if findings else None
    first = rows.index(mark) if mark in rows else None
    return Curve(
        title, tuple(p or "(model)" for p in rows), tuple(lines), limits, first, tuple(notes),
        _details([step], where, rows),
    )  # fmt: skip


def heatmap(
    title: str,
    steps: Sequence[Step],
    where: Places,
    findings: Sequence[Finding],
    notes: Sequence[str],
    dtype: str | None = None,
) -> Heatmap:
    """Return a heat map of blocks by steps, with one column for the forward and one for the backward pass."""
    rows = ran(steps, where)
    relative = dtype is None and all(e.dtype != torch.float16 for s in steps for e in s.events)
    columns: list[str] = []
    cells: dict[tuple[int, int], Cell] = {}
    first_bad = None
    start = findings[0] if findings else None
    for phase, suffix in PASSES:
        against = _largest_of(steps, phase) if relative else None
        for step in steps:
            if not (events := step.of(phase)):
                continue
            columns.append(f"{f'epoch {step.epoch}, ' if step.epoch else ''}step {step.number}{suffix}")
            own = tensors([step], phase)
            held: dict[str | None, list[Event]] = defaultdict(list)
            for event in events:
                held[where.enclosing(event.module)].append(event)
            for index, path in enumerate(rows):
                inner = held[path]
                if not (here := own.get(path) or inner):
                    continue
                place = (index, len(columns) - 1)
                more: tuple[tuple[str, str], ...] = ()
                marked = start is not None and _meets(start, step, phase) and where.enclosing(start.module) == path
                if start is not None and marked:
                    first_bad, more = place, _cause(start)
                cells[place] = _cell(here, inner, against, dtype, more)
    words = (
        "max |x|, in doublings below the largest of all forward, or of all backward, passes:"
        if relative
        else f"max |x|, in doublings left to the limit of {dtype or 'its dtype'}, log2(limit / max |x|):"
    )
    shown = tuple(p or "(model)" for p in rows)
    details = _details(steps[-1:], where, rows)
    return Heatmap(title, shown, tuple(columns), cells, first_bad, tuple(notes), (), words, details)


def _largest_of(steps: Sequence[Step], phase: Phase) -> float:
    return max((e.stats.largest for s in steps for e in s.of(phase) if _counts(e)), default=1.0) or 1.0


def _counts(event: Event) -> bool:
    """True unless this is a mask, which holds the lowest value of its dtype."""
    return event.stats.largest < 0.9 * float(torch.finfo(event.dtype).max)


def _limit(name: str) -> float:
    return float(torch.finfo(getattr(torch, name)).max)


def _smallest(name: str) -> float:
    return float(torch.finfo(getattr(torch, name)).tiny)


def _meets(finding: Finding, step: Step, phase: str) -> bool:
    forward = finding.phase in ("weights", "forward")
    return (finding.step, finding.epoch) == (step.number, step.epoch) and forward == (phase == "forward")


def _cause(finding: Finding) -> tuple[tuple[str, str], ...]:
    return (("operation", finding.operation or "not known"), ("why", finding.why), ("seen in", finding.tensor))


def _cell(
    shown: list[Event], inner: list[Event], against: float | None, dtype: str | None, more: tuple[tuple[str, str], ...]
) -> Cell:
    top = max(shown, key=lambda e: e.stats.largest)
    stats = top.stats
    bad = [e for e in (*shown, *inner) if e.bad]
    facts = (
        *more,
        ("tensor", f"{top.label} of {top.module or 'the model'}"),
        ("dtype", dtype_name(top.dtype)),
        ("shape", "x".join(map(str, top.shape)) or "scalar"),
        ("max |x|", f"{stats.largest:.6g}"),
        ("min, max", f"{_number(stats.least)}, {_number(stats.most)}"),
        ("mean, RMS", f"{stats.mean:.4g}, {stats.rms:.4g}"),
        ("zeros", f"{stats.zeros:.2%}"),
        *(("not finite", f"{e.label} of {e.module or 'the model'}: {e.stats.holds}") for e in bad[:3]),
    )
    limit = against if against is not None else _limit(dtype or dtype_name(top.dtype))
    return Cell(stats.largest if stats.least is not None else None, limit, bool(bad), facts, against is not None)


def _details(steps: Sequence[Step], where: Places, rows: Sequence[str]) -> tuple[Sheet, ...]:
    """Return a table for each block: the modules in it, in the last step."""
    forth, back = tensors(steps, "forward"), tensors(steps, "backward")
    order = list(dict.fromkeys(p.path for s in steps for p in s.passages))
    sheets: list[Sheet] = []
    left = DETAILED
    for block in rows:
        inner = [p for p in order if p in where.inner and where.enclosing(p) == block]
        if block not in where.blocks or not inner or left < len(inner):
            continue
        left -= len(inner)
        lines = tuple(
            (p.removeprefix(f"{block}."), *_figures(forth.get(p, [])), *_figures(back.get(p, []))) for p in inner
        )
        columns = ("module", "RMS", "max |x|", "RMS grad", "max |grad|")
        sheets.append(Sheet(block or "(model)", columns, lines))
    return tuple(sheets)


def _figures(events: Sequence[Event]) -> tuple[str, str]:
    finite = [e for e in events if e.stats.least is not None]
    bad = next((e.stats.holds for e in events if e.bad), None)
    if bad is not None:
        return "", bad
    top = max(finite, key=lambda e: e.stats.largest, default=None)
    return ("-", "-") if top is None else (f"{top.stats.rms:.4g}", f"{top.stats.largest:.4g}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
