"""The figures of one module, by its path: `trace["model.layers.7"].output`."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hfpatch.dtypes import dtype_name
from hfpatch.errors import InputError
from hfpatch.report.sheet import Sheet, Shown
from hfpatch.tracing.events import Event, Stats, Step

LATE = "a later operation wrote to it in place: these are its values after that"


@dataclass(frozen=True, repr=False)
class Figures(Shown):
    """The tensors of one module in the traced steps.

    Attributes:
        path: Path of the module.
        tensors: Each of them: index of the step, `input`, `output`, `gradient of input`, `gradient of output`,
            `parameter` or `gradient of parameter`, its name, and the event.
    """

    path: str
    tensors: tuple[tuple[int, str, str, Event], ...]

    @property
    def output(self) -> Stats | None:
        """Statistics of its first output in the last step; None if it returned no floating-point tensor."""
        return self._last("output")

    @property
    def input(self) -> Stats | None:
        """Statistics of its first input in the last step; None if it was given no floating-point tensor."""
        return self._last("input")

    @property
    def gradient(self) -> Stats | None:
        """Statistics of the gradient of its first output in the last step; None if it had none."""
        return self._last("gradient of output")

    @property
    def input_gradient(self) -> Stats | None:
        """Statistics of the gradient of its first input in the last step; None if it had none."""
        return self._last("gradient of input")

    def _last(self, role: str) -> Stats | None:
        here = [(step, event) for step, what, _, event in self.tensors if what == role]
        last = max((step for step, _ in here), default=None)
        return next((event.stats for step, event in here if step == last), None)

    def to_dict(self) -> dict[str, Any]:
        """Return `{"path", "tensors": [{"step", "tensor", "name", ...statistics}]}`."""
        rows = [{"step": s, "tensor": r, "name": n, **asdict(e.stats)} for s, r, n, e in self.tensors]
        return {"path": self.path, "tensors": rows}

    def sheet(self) -> Sheet:
        """Return one row for each tensor."""
        rows = tuple(
            (
                str(step),
                f"{role} {name!r}" if name else role,
                f"{dtype_name(e.dtype)} [{'x'.join(map(str, e.shape)) or 'scalar'}]",
                f"{e.stats.rms:.4g}",
                f"{e.stats.largest:.4g}",
                f"{e.stats.zeros:.1%}",
                "; ".join([e.stats.holds] * e.bad + [LATE] * e.late),
            )
            for step, role, name, e in self.tensors
        )
        columns = ("step", "tensor", "dtype", "RMS", "max |x|", "zeros", "")
        return Sheet(self.path or "the model", columns, rows, wide=("tensor",))


def figures(steps: Sequence[Step], paths: Collection[str], path: str) -> Figures:
    """Return the figures of a module.

    Args:
        steps: The traced steps.
        paths: The paths of all modules of the model.
        path: That of the module; empty for the model.

    Raises:
        InputError: The model has no such module, or it was not measured.
    """
    if path not in paths:
        near = difflib.get_close_matches(path, paths, n=3, cutoff=0.5)
        raise InputError(
            f"trace[{path!r}]: the model has no module of this path"
            + (f"; near it are {', '.join(near)}" if near else "")
        )
    found = tuple(row for step in steps for row in _of_step(step, path))
    if not found:
        raise InputError(
            f"trace[{path!r}]: this module was not measured: it did not run in a traced step, or it lies inside a "
            "block; trace it with level='modules'"
        )
    return Figures(path, found)


def _of_step(step: Step, path: str) -> list[tuple[int, str, str, Event]]:
    found: list[tuple[int, str, str, Event]] = []
    gradients = {e.forward: e for e in reversed(step.of("backward")) if e.forward is not None}
    for passage in step.passages:
        if passage.path != path:
            continue
        for role, indices in (("input", passage.inputs), ("output", passage.outputs)):
            for event in (step.events[i] for i in indices):
                name = event.name if event.module == path else ""
                found.append((step.number, role, name, event))
                if event.index in gradients:
                    found.append((step.number, f"gradient of {role}", name, gradients[event.index]))
    for event in step.events:
        if event.module == path and not event.is_difference:
            if event.phase == "weights":
                found.append((step.number, event.role, event.name, event))
            elif event.phase == "gradients":
                found.append((step.number, "gradient of parameter", event.name, event))
            elif event.phase == "backward" and event.forward is None:  # recomputed under checkpointing
                found.append((step.number, f"gradient of {event.role}", event.name, event))
    return found
