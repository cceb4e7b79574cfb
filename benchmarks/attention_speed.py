"""Time and memory of our attention functions beside transformers' sdpa attention, in turn, on a GPU.

    python benchmarks/attention_speed.py --device cuda

Target: `fp32-attention-logits` at 4,096 tokens at most 1.10 times the time of stock sdpa, no tokens x tokens tensor.
Shape: 2 rows, 16 heads over 4 key heads, width 128. `padded` gives both a boolean mask, which they hold anyway.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from common import Row, alternate, cpu_name, header, median, ratio, spread, table, write_json
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hfpatch.numerics.attention_functions import fp32_logits_attention, sdpa_without_cudnn

WAYS: dict[str, Callable[..., Any]] = {
    "stock sdpa": sdpa_attention_forward,
    "stock sdpa again": sdpa_attention_forward,
    "fp32 logits": fp32_logits_attention,
    "without cuDNN": sdpa_without_cudnn,
}
TARGET = 1.10


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()
    where = torch.cuda.get_device_name() if args.device == "cuda" else cpu_name()
    facts = header("Attention: time and memory", where, "torch", "transformers", "hfpatch")
    rows: list[Row] = []
    for dtype in (torch.bfloat16, torch.float16):
        for padded in (False, True):
            for backward in (False, True):
                rows += measure(args, dtype, padded, backward)
    facts["rows"] = rows
    table(f"{args.tokens} tokens", rows, f"time / stock: median of {args.rounds} paired ratios; asked at most {TARGET}")
    write_json(args.json, facts)


def measure(args: argparse.Namespace, dtype: torch.dtype, padded: bool, backward: bool) -> list[Row]:
    """One row for each way."""
    module = SimpleNamespace(num_key_value_groups=4, is_causal=True, training=False)
    inputs = [
        torch.randn(2, heads, args.tokens, 128, device=args.device, dtype=dtype).requires_grad_(backward)
        for heads in (16, 4, 4)
    ]
    mask = None
    if padded:
        mask = torch.ones(args.tokens, args.tokens, dtype=torch.bool, device=args.device).tril()
        mask = mask[None, None].repeat(2, 1, 1, 1)
        mask[0, ..., : args.tokens // 3] = False  # row 0 is padded on the left

    def once(way: Callable[..., Any]) -> float:
        start, end = Clock(args.device), Clock(args.device)
        start.mark()
        out, _ = way(module, *inputs, mask, scaling=128**-0.5)
        if backward:
            out.backward(out.detach())
        end.mark()
        return start.until(end)

    for way in WAYS.values():  # warm
        once(way)
        once(way)
    peaks = {name: peak(args.device, lambda w=way: once(w)) for name, way in WAYS.items()}
    times = alternate(args.rounds, {name: lambda w=way: once(w) for name, way in WAYS.items()})
    return [
        {
            "dtype": str(dtype).removeprefix("torch."),
            "mask": "padded" if padded else "causal",
            "what": "forward + backward" if backward else "forward",
            "way": name,
            "ms": median(times[name]),
            "time / stock": ratio(times[name], times["stock sdpa"]),
            "quartiles": spread(times[name], times["stock sdpa"]),
            "peak MiB": peaks[name],
        }
        for name in WAYS
    ]


class Clock:
    """A point in time, on the device where there is one."""

    def __init__(self, device: str) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if device == "cuda" else None
        self.seconds = 0.0

    def mark(self) -> None:
        """Now."""
        import time

        if self.event is None:
            self.seconds = time.perf_counter()
        else:
            self.event.record()

    def until(self, other: Clock) -> float:
        """Milliseconds from here to there."""
        if self.event is None or other.event is None:
            return (other.seconds - self.seconds) * 1e3
        torch.cuda.synchronize()
        return self.event.elapsed_time(other.event)


def peak(device: str, run: Callable[[], float]) -> float | None:
    """Most memory held during a run beyond what was held before, in MiB; None on a CPU."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


if __name__ == "__main__":
    main()
