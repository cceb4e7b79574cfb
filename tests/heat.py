"""A heat map as a float16 run gives it whose residual stream grows with depth and step until it overflows."""

from __future__ import annotations

import math

from hfpatch.report.grid import Cell
from hfpatch.report.heatmap import Heatmap
from hfpatch.report.sheet import Sheet

HOSTILE = "model.</script><script>window.broken = 1</script>\"'&$\\frac$"
LAYERS = 80
LIMIT = 65504.0


def example(layers: int = LAYERS, steps: int = 10) -> Heatmap:
    """Embedding, layers, a module of a hostile name and the head; two columns a step.

    The stream of step s passes the limit in the layer that its growth leads to; the backward pass of a step that
    overflowed holds nothing finite. With few layers or steps nothing goes wrong.
    """
    rows = ("model.embed_tokens", *(f"model.layers.{i}" for i in range(layers)), HOSTILE, "lm_head")
    columns = tuple(f"step {s}{suffix}" for s in range(steps) for suffix in ("", " backward"))
    cells: dict[tuple[int, int], Cell] = {}
    first: tuple[int, int] | None = None
    for s in range(steps):
        stream = [_stream(depth, s, layers) for depth in range(len(rows))]
        overflow = next((r for r, value in enumerate(stream) if value > LIMIT), None)
        if overflow is not None and first is None:
            first = (overflow, 2 * s)
        for r, row in enumerate(rows):
            bad = overflow is not None and r >= overflow
            value = None if bad and r != overflow else min(stream[r], LIMIT)
            cells[r, 2 * s] = _cell(row, "output", value, bad)
            gradient = 3e-3 * math.exp(1.5 * math.sin(r / 9)) * 0.985 ** (len(rows) - r)
            if row != HOSTILE:
                lost = overflow is not None
                cells[r, 2 * s + 1] = _cell(row, "gradient of output", None if lost else gradient, lost)
    notes = ("Nothing went wrong.",)
    if first:
        where = f"{columns[first[1]]}, forward: the residual add in {rows[first[0]]}"
        notes = (
            f"{where} passes the largest value of float16, 65,504",
            "try: hfpatch.apply(model, only=['fp16-residual-overflow'])",
        )
    sheets = (Sheet("Largest gradients", ("parameter", "max |grad|"), ((HOSTILE, "1.5"), ("lm_head.weight", "0.04"))),)
    return Heatmap(
        f"trace of LlamaForCausalLM: {steps} step{'' if steps == 1 else 's'}",
        rows,
        columns,
        cells,
        first,
        notes,
        sheets,
    )


def _stream(depth: int, step: int, layers: int) -> float:
    """Largest magnitude of the residual stream: one jump early, steady growth, a few batches worse than others."""
    at = depth / (layers + 2)
    batch = 0.07 * step + 0.6 * math.sin(1.3 * step + 3.4)
    growth = 10.0 * at**0.7 + 3.2 * (at > 0.04) + batch * at + 0.15 * math.sin(7 * depth + step)
    return 4 * 2 ** (growth * min(1.0, layers / 40))


def _cell(row: str, what: str, value: float | None, bad: bool) -> Cell:
    facts = (
        ("tensor", f"{what} of {row}"),
        ("dtype", "float16"),
        ("shape", "2x512x8192"),
        *((("not finite", "1,204 +Inf of 8,388,608 elements"),) if bad else ()),
    )
    return Cell(value, LIMIT, bad, facts)
