"""The largest values that the operations of each module give in a run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hfpatch.compat import hooks, operators
from hfpatch.inspecting.feed_forward import is_activation
from hfpatch.model.roles import Stack

LIMIT = 65_504.0
"""The largest float16."""
MASK = 1e30
"""Values beyond it are those of a mask, not of a signal."""
NOW = "on this batch"


@dataclass(frozen=True)
class Peak:
    """The largest absolute value at some places, and the path of the module it was found in; see `Peaks.seen`."""

    value: float
    path: str
    seen: str = NOW

    @property
    def room(self) -> float:
        """How many times as large it could be in float16; below 1 if it passes float16's maximum."""
        return LIMIT / self.value if self.value else math.inf

    def __str__(self) -> str:
        if not math.isfinite(self.value):
            return f"is not finite in {self.path}, in float32 either"
        if self.value > LIMIT:
            measured = "" if self.seen == NOW else f", measured {self.seen}"
            return f"reaches {self.value:,.0f} of {LIMIT:,.0f} in {self.path}{measured}"
        return f"reaches {self.value:,.4g} in {self.path}: room {self.room:,.2g}x {self.seen}"


@dataclass(frozen=True)
class Peaks:
    """What was measured in a run in a dtype with float32's range.

    Attributes:
        values: Path of a module -> the largest absolute value that its own operations gave, not those of modules in
            it; of an activation, that of its output. NaN if one was NaN. Modules that did not run are left out.
        seen: On what it was measured, for sentences: `on this batch`, `on 512 tokens, kept in ...`.
    """

    values: Mapping[str, float]
    seen: str = NOW

    def at(self, paths: Iterable[str]) -> Peak | None:
        """Return the largest value at these modules; NaN only if no other passes float16's maximum; None if none ran.

        A quantised map that casts to float16 itself gives NaN where the others have a value.
        """
        found = [Peak(self.values[p], p, self.seen) for p in dict.fromkeys(paths) if p in self.values]
        size = {id(peak): LIMIT if math.isnan(peak.value) else peak.value for peak in found}
        return max(found, key=lambda peak: size[id(peak)], default=None)

    def stream(self, stacks: Iterable[Stack]) -> Peak | None:
        """Return the largest value of the residual streams, which the layers add up; None if none ran."""
        return self.at(path for stack in stacks for path, _ in (*stack.layers, *stack.items))


@contextlib.contextmanager
def peaks_of(model: nn.Module) -> Generator[dict[str, torch.Tensor]]:
    """Collect the largest absolute values of each module's own operations while the context lasts.

    Yields the values by path, as tensors on their devices, which are complete when the context ends.
    """
    found: dict[str, torch.Tensor] = {}
    running: list[str] = []

    def noting(path: str, module: nn.Module) -> hooks.Around:
        def begin(_module: nn.Module, _args: Any, _kwargs: Any) -> None:
            running.append(path)

        def end(_module: nn.Module, _args: Any, _output: Any) -> None:
            running.pop()

        def end_of_activation(_module: nn.Module, _args: Any, output: Any) -> None:
            running.pop()
            largest.note(path, output)

        return module, begin, end_of_activation if path in activations else end

    activations = {path for path, module in model.named_modules() if is_activation(module)}
    largest = _Largest(found, running, activations)
    around = [noting(path, module) for path, module in model.named_modules()]
    key = hooks.around(around)
    try:
        with largest:
            yield found
    finally:
        hooks.drop_around(around, key)


class _Largest(operators.DispatchMode):
    """Notes the largest absolute value of what each operation computes, at the module that is running."""

    def __init__(self, found: dict[str, torch.Tensor], running: list[str], activations: set[str]) -> None:
        super().__init__()
        self.found, self.running, self.activations = found, running, activations

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation, and note its results."""
        out = func(*args, **(kwargs or {}))
        if self.running and self.running[-1] not in self.activations and not operators.moves_only(func):
            for result in out if isinstance(out, (tuple, list)) else (out,):
                self.note(self.running[-1], result)
        return out

    def note(self, path: str, result: Any) -> None:
        """Note the largest absolute value of a floating-point tensor."""
        if not isinstance(result, torch.Tensor) or not result.is_floating_point() or not result.numel():
            return
        size = result.detach().abs()
        peak = size.masked_fill(size > MASK, 0).amax().double()
        there = self.found.get(path)
        self.found[path] = peak if there is None else torch.maximum(there, peak.to(there.device))
