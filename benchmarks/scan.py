"""What `hfpatch.scan` takes, beside one bare pass of aminmax over the same file, mapped; and its memory.

    OMP_NUM_THREADS=1 python benchmarks/scan.py
    OMP_NUM_THREADS=1 python benchmarks/scan.py --gib 1 8 --folder /somewhere/with/room

Target: at least 0.8 of the speed of the pass; under 400 MB in all processes together, whatever the size. The pass is
`torch.aminmax` of each tensor that `safe_open` gives, which maps the file, in this process with torch loaded, by one
thread and by as many as there are cores, which torch takes by itself. A scan is timed whole: its processes start,
read, and end. The file is
in the page cache: a disk would be what both wait for.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import ROOT, Row, alternate, cpu_name, header, median, ratio, spread, table, write_json

SPEED = 0.8
MEGABYTES = 400.0
TENSOR = 2**26
"""Bytes of each tensor of the file."""

DTYPES = {"F32": ("float32", 4), "BF16": ("bfloat16", 2)}
PEAK = """
import resource, sys, hfpatch
report = hfpatch.scan(sys.argv[1], processes=int(sys.argv[2]))
assert not report.findings
own = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, nargs="+", default=[1.0, 8.0], help="sizes of the file")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", help="where the file is made, and deleted")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))

    facts = header("A scan beside a bare aminmax", cpu_name(), "torch", "safetensors", "numpy", "hfpatch")
    facts["speed"], facts["memory"] = [], []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        need = int(max(args.gib) * 2**30)
        if shutil.disk_usage(folder).free < 2 * need:
            raise SystemExit(f"the file needs {need:,} bytes, and as much should stay free; name another --folder")
        for dtype in DTYPES:
            for gib in args.gib:
                file = make(Path(folder) / "model.safetensors", dtype, int(gib * 2**30))
                facts["speed"] += speed(file, dtype, gib, args.rounds, cores)
                facts["memory"] += [memory(file, dtype, gib, n) for n in sorted({1, cores, 4})]
                file.unlink()
    table(
        f"Speed, median of {args.rounds} rounds in turn",
        facts["speed"],
        f"target: {SPEED} of the speed of a bare pass by one thread; quartiles are of the ratio before them",
    )
    table("Peak memory", facts["memory"], f"target: under {MEGABYTES:.0f} MB together, each counted as if alone")
    write_json(args.json, facts)


def make(file: Path, dtype: str, size: int) -> Path:
    """A file of tensors of normal numbers."""
    import torch

    name, width = DTYPES[dtype]
    block = (torch.randn(TENSOR // width) * 0.02).to(getattr(torch, name)).view(torch.uint8).numpy().tobytes()
    count = max(1, size // TENSOR)
    tensors = {
        f"layers.{i}": {
            "dtype": dtype,
            "shape": [TENSOR // width // 4096, 4096],
            "data_offsets": [i * TENSOR, (i + 1) * TENSOR],
        }
        for i in range(count)
    }
    raw = json.dumps(tensors).encode()
    raw += b" " * (-len(raw) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(raw)) + raw)
        for _ in range(count):
            out.write(block)
    return file


def speed(file: Path, dtype: str, gib: float, rounds: int, cores: int) -> list[Row]:
    """The pass with one thread and more, a scan with one process and more, in turn."""
    import torch
    from safetensors import safe_open

    import hfpatch

    size = file.stat().st_size

    def bare(threads: int) -> Callable[[], float]:
        def once() -> float:
            torch.set_num_threads(threads)
            start = time.perf_counter()
            with safe_open(file, "pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - no mapping
                    torch.aminmax(opened.get_tensor(key))
            return time.perf_counter() - start

        return once

    def scan(processes: int) -> Callable[[], float]:
        def once() -> float:
            start = time.perf_counter()
            assert not hfpatch.scan(file, processes=processes).findings
            return time.perf_counter() - start

        return once

    counts = sorted({1, cores})
    passes = {f"aminmax, {n} thread{'s' * (n > 1)}": bare(n) for n in counts}
    scans = {f"scan, {n} process{'es' * (n > 1)}": scan(n) for n in counts}
    alternate(1, {**passes, **scans})
    times = alternate(rounds, {**passes, **scans})
    rows: list[Row] = []
    for name, seconds in times.items():
        row: Row = {"file": f"{dtype}, {gib:g} GiB", "variant": name, "s": median(seconds)}
        row["GB/s"] = size / median(seconds) / 1e9
        for n, base in zip(counts, passes, strict=True):
            mine = name in scans
            row[f"of aminmax, {n} thr."] = ratio(times[base], seconds) if mine else None
            row[f"quartiles, {n} thr."] = spread(times[base], seconds) if mine else None
        row["within target"] = ratio(times[next(iter(passes))], seconds) >= SPEED if name in scans else None
        rows.append(row)
    return rows


def memory(file: Path, dtype: str, gib: float, processes: int) -> Row:
    """Of a process that only scans, and of its workers."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PEAK, str(file), str(processes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    own, worker = (int(n) / 1e6 for n in done.stdout.split())
    together = own + (processes * worker if processes > 1 else 0)
    return {
        "file": f"{dtype}, {gib:g} GiB",
        "processes": processes,
        "own MB": own,
        "largest worker MB": worker or None,
        "together MB": together,
        "within target": together < MEGABYTES,
    }


if __name__ == "__main__":
    main()
