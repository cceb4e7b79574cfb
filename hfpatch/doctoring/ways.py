"""Ways to run a model (dtype of its weights, autocast, patches): error, memory and time of a forward pass of each."""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from hfpatch.compat import operators
from hfpatch.compat.modules import buffers, unsaved
from hfpatch.compat.quantising.quantised import changed_by_a_run
from hfpatch.model.rebuilt import as_loaded
from hfpatch.model.survey import Survey
from hfpatch.numerics.autocast import autocast_as
from hfpatch.patching.verifying.lending import can_be_cast

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
T = TypeVar("T")
EQUAL, LEAN = 1.5, 1.05
"""Up to EQUAL times the least, errors count as equal (another text would order them otherwise); up to LEAN times it,
memory and time."""


@dataclass(frozen=True)
class Way:
    """One way to run a model.

    Attributes:
        name: In words.
        weights: Dtype of the weights.
        autocast: Dtype of an autocast region; None for none.
        patched: True with what `hfpatch.apply` does to it.
    """

    name: str
    weights: torch.dtype
    autocast: torch.dtype | None = None
    patched: bool = False

    def region(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Return its autocast region, or one without autocast, whatever region the caller is in."""
        return autocast_as(device.type, self.autocast)


FLOAT32 = Way("float32", FP32)
STOCK, PATCHED = Way("float16, stock", FP16), Way("float16, hfpatch.apply", FP16, patched=True)
BFLOAT16 = Way("bfloat16", BF16)
WAYS = (
    *(FLOAT32, STOCK, PATCHED, BFLOAT16),
    Way("float32, bfloat16 autocast", FP32, BF16),
    Way("float32, float16 autocast", FP32, FP16),
)


@dataclass(frozen=True)
class Run:
    """What one way gave on the caller's batch.

    Attributes:
        way: The way.
        loss: The model's own loss; None if it returns none.
        kl: Mean KL divergence from the float32 checkpoint, in nats per token; NaN if it is not finite or did not run.
        top1: Share of tokens with the same most likely token as in float32.
        seconds: Median time of a forward pass.
        memory: Bytes of the weights and of what a forward pass holds at its peak.
        why: Why it did not run; empty if it did.
    """

    way: Way
    loss: float | None
    kl: float
    top1: float
    seconds: float
    memory: int
    why: str = ""

    @property
    def finite(self) -> bool:
        """True if it ran and every logit was finite."""
        return math.isfinite(self.kl)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for JSON; non-finite numbers become None."""
        values = {"loss": self.loss, "kl": self.kl, "top1": self.top1, "seconds": self.seconds, "memory": self.memory}
        finite = {k: v if v is not None and math.isfinite(v) else None for k, v in values.items()}
        return {"way": self.way.name, **finite, "why": self.why}


def best(rows: Sequence[Mapping[str, Any]], error: str, size: str, duration: str) -> Mapping[str, Any] | None:
    """Return the row with the least error; of those as good, the leanest; of those as lean, the fastest.

    Those that are equal in all three are ordered by error again. None if no error is finite.

    Args:
        rows: One for each way, without float32.
        error: Key of the error.
        size: Key of the memory.
        duration: Key of the time.
    """
    left = [row for row in rows if math.isfinite(row[error])]
    for column, factor in ((error, EQUAL), (size, LEAN), (duration, LEAN)):
        least = min((row[column] for row in left), default=0.0)
        left = [row for row in left if row[column] <= factor * least]
    return min(left, key=lambda row: row[error]) if left else None


def chosen(runs: Sequence[Run]) -> Run | None:
    """Return the best way to run a model; None if none but float32 is finite."""
    rows = [{"run": r, "kl": r.kl, "memory": r.memory, "seconds": r.seconds} for r in runs if r.way != FLOAT32]
    found = best(rows, "kl", "memory", "seconds")
    return None if found is None else found["run"]


def held_memory(device: torch.device, body: Callable[[], T]) -> tuple[int, T]:
    """Return the bytes of tensors that a call holds at its peak, beyond those held before it, and its result.

    On a CPU the tensors that operators return are counted while they are alive; what a kernel takes and gives back is
    not.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        out = body()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - held, out
    with _Alive() as alive:
        out = body()
    return alive.most, out


class _Alive(operators.DispatchMode):
    """Counts the bytes of the tensors that operators make and that are alive.

    Attributes:
        most: The most bytes at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = self.now = 0
        self._users: dict[int, int] = {}
        self._refs: dict[int, weakref.ref[torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count what it made."""
        kwargs = kwargs or {}
        given = {t.untyped_storage().data_ptr() for t in _tensors((*args, *kwargs.values()))}
        out = func(*args, **kwargs)
        for tensor in _tensors((out,)):
            storage = tensor.untyped_storage()
            place = storage.data_ptr()
            if id(tensor) in self._refs or (place in given and place not in self._users):
                continue  # it was there before the call
            self._hold(tensor, place, storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def _hold(self, tensor: torch.Tensor, place: int, size: int) -> None:
        if place not in self._users:
            self.now += size
        self._users[place] = self._users.get(place, 0) + 1
        key = id(tensor)

        def gone(_: object) -> None:
            self._refs.pop(key, None)
            self._users[place] -= 1
            if not self._users[place]:
                del self._users[place]
                self.now -= size

        self._refs[key] = weakref.ref(tensor, gone)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def clocked(device: torch.device, body: Callable[[], object], turns: int) -> float:
    """Return the median seconds of some calls."""
    times: list[float] = []
    for _ in range(turns):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        body()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers, shared ones once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.nbytes for t in tensors.values())


def copied(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a model in evaluation mode, as `from_pretrained(dtype=)` loads it: some buffers stay float32.

    Memory: the weights in that dtype; the copy shares those that have it already, and quantised ones, but for those of
    bitsandbytes, which are copied.
    """
    survey = Survey(model)
    loaded = as_loaded(survey, dtype)
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to(dtype), p.requires_grad) if can_be_cast(p) and p.dtype != dtype else p
        for p in model.parameters()
    }
    for parameter, *_ in changed_by_a_run(survey.modules.values()):  # a run of the copy would change the model's
        del memo[id(parameter)]
    for path, module in survey.modules.items():
        for name, value in buffers(module).items():
            if value is None or not value.is_floating_point():
                continue
            kept = loaded.get((path, name)) if name in unsaved(module) else value.detach().to(dtype)
            memo[id(value)] = value.detach().clone() if kept is None else kept.to(value.device, copy=True)
    return copy.deepcopy(model, memo).eval()
