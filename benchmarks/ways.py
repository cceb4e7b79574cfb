"""Ways to run a model (dtype of its weights, autocast, patches), and the time and memory of one call."""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
T = TypeVar("T")


@dataclass(frozen=True)
class Way:
    """One way to run a model."""

    name: str
    weights: torch.dtype
    autocast: torch.dtype | None = None
    patched: bool = False
    include: tuple[str, ...] = ()
    """Opt-in patches that are applied too."""

    def region(self, device: torch.device) -> Any:
        """Its autocast region."""
        return torch.autocast(device.type, dtype=self.autocast) if self.autocast else contextlib.nullcontext()


def clocked(device: torch.device, body: Callable[[], T]) -> tuple[float, float, T]:
    """Milliseconds, peak GiB and result of one call; no memory figure on a CPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        out = body()
        return (time.perf_counter() - start) * 1e3, 0.0, out
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    begin.record()
    out = body()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end), torch.cuda.max_memory_allocated(device) / 2**30, out


def memory(device: torch.device, body: Callable[[], T]) -> tuple[float, T]:
    """Bytes of tensors that one call holds at its peak, beyond those held before it; and its result.

    On a CPU they are counted by the profiler, which makes the call slower. Scratch memory that a kernel takes from
    elsewhere is not counted.
    """
    if device.type == "cuda":
        held = torch.cuda.memory_allocated(device)
        _, peak, out = clocked(device, body)
        return peak * 2**30 - held, out
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        out = body()
    with tempfile.TemporaryDirectory() as folder:
        seen.export_chrome_trace(str(file := Path(folder) / "trace.json"))
        events = json.loads(file.read_text())["traceEvents"]
    held = highest = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        highest = max(highest, held)
    return highest, out


def free(device: torch.device) -> None:
    """Give memory back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
