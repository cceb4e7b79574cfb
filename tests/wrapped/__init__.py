"""Rows of the matrix that need steps of their own, or packages of `requirements-wrapped.txt`.

A row is called with a kind of edit (a key of `SUBJECTS`) and an order, and returns the outcome of that cell.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.cells import Outcome
from tests.wrapped import exported, generated, kernelized, liger, on_meta, processes, tensor_parallel

Row = Callable[[str, str], Outcome]

WITH_PACKAGES: dict[str, Row] = {
    "Liger": liger.row,
    "kernelize": kernelized.row,
}
ROWS: dict[str, Row] = {
    "meta, then `load_state_dict(assign=True)`": on_meta.assigned,
    "meta, then `to_empty`": on_meta.emptied,
    "tensor parallel": tensor_parallel.row,
    "torch.export": exported.row,
    "fork": processes.forked,
    "spawn": processes.spawned,
    **WITH_PACKAGES,
    "generate, static cache": generated.static,
    "generate, beams": generated.beams,
    "generate, assistant model": generated.assisted,
}
