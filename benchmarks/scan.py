"""What `hfpatch.scan` takes, beside one bare pass of aminmax over the same files, mapped; and its memory.

    OMP_NUM_THREADS=1 python benchmarks/scan.py
    OMP_NUM_THREADS=1 python benchmarks/scan.py --gib 1 8 --folder /somewhere/with/room

Target: at least 0.8 of the speed of the pass; under 400 MB in all processes together, whatever the size. The pass is
`torch.aminmax` of each tensor that `safe_open` gives, which maps the file, in this process with torch loaded, by one
thread and by as many as there are cores, which torch takes by itself. A scan is timed whole: its processes start,
read, and end. The files are in the page cache: a disk would be what both wait for. Seconds of the processor are those
of all threads and processes; other work on the machine changes them less than the time on the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from common import ROOT, Row, alternate, cpu_name, header, median, ratio, spread, table, write_json

SPEED = 0.8
MEGABYTES = 400.0
TENSOR = 2**26
"""Bytes of each tensor of the file."""

SHARDED = {1000: 768, 4: 8192}
"""Number of shards -> width of the layers in them: shards of 3 and 5 MB, and of some 400 MB."""

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
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        need = int(max(args.gib) * 2**30)
        if shutil.disk_usage(place).free < 2 * need:
            raise SystemExit(f"the file needs {need:,} bytes, and as much should stay free; name another --folder")
        for count, layer in SHARDED.items():
            folder = sharded(Path(place) / "sharded", count, layer)
            name = f"{count:,} shards, F16 and BF16, {sum(f.stat().st_size for f in files_of(folder)) / 2**30:.2f} GiB"
            facts["speed"] += speed(folder, name, args.rounds, [1])
            facts["memory"].append(memory(folder, name, 1))
            shutil.rmtree(folder)
        for dtype in DTYPES:
            for gib in args.gib:
                file = make(Path(place) / "model.safetensors", dtype, int(gib * 2**30))
                facts["speed"] += speed(file, f"{dtype}, {gib:g} GiB", args.rounds, sorted({1, cores}))
                facts["memory"] += [memory(file, f"{dtype}, {gib:g} GiB", n) for n in sorted({1, cores, 4})]
                file.unlink()
    table(
        f"Speed, median of {args.rounds} rounds in turn",
        facts["speed"],
        f"target: {SPEED} of the speed of a bare pass by one thread, on the clock and in seconds of the processor; "
        "quartiles are of the ratio before them",
    )
    table("Peak memory", facts["memory"], f"target: under {MEGABYTES:.0f} MB together, each counted as if alone")
    write_json(args.json, facts)


def files_of(path: Path) -> list[Path]:
    """The weight files of a folder, or a file."""
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def sharded(folder: Path, count: int, width: int) -> Path:
    """A checkpoint of shards that hold a layer's attention or its MLP, in float16 and bfloat16 by turns of two."""
    import torch
    from safetensors.torch import save_file

    halves: tuple[dict[str, tuple[int, ...]], ...] = (
        {
            "input_layernorm": (width,), "self_attn.q_proj": (width, width), "self_attn.k_proj": (width // 4, width),
            "self_attn.v_proj": (width // 4, width), "self_attn.o_proj": (width, width),
        },
        {"post_attention_layernorm": (width,), "mlp.up_proj": (2 * width, width), "mlp.down_proj": (width, 2 * width)},
    )  # fmt: skip
    folder.mkdir()
    where: dict[str, str] = {}
    for at in range(count):
        dtype = (torch.float16, torch.bfloat16)[at // 2 % 2]
        tensors = {
            f"model.layers.{at // 2}.{name}.weight": (torch.randn(shape) * 0.02).to(dtype)
            for name, shape in halves[at % 2].items()
        }
        name = f"model-{at + 1:05}-of-{count:05}.safetensors"
        save_file(tensors, folder / name)
        where |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


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


def processor() -> float:
    """Seconds of the processor that this process and its ended children took."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def speed(path: Path, name: str, rounds: int, counts: Sequence[int]) -> list[Row]:
    """The pass with one thread and more, a scan with one process and more, in turn."""
    import torch
    from safetensors import safe_open

    import hfpatch

    files = files_of(path)
    size = sum(file.stat().st_size for file in files)
    spent: dict[str, list[float]] = {}

    def timed(variant: str, action: Callable[[], object]) -> Callable[[], float]:
        def once() -> float:
            start, before = time.perf_counter(), processor()
            action()
            spent.setdefault(variant, []).append(processor() - before)
            return time.perf_counter() - start

        return once

    def bare(threads: int) -> None:
        torch.set_num_threads(threads)
        for file in files:
            with safe_open(file, "pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - no mapping
                    torch.aminmax(opened.get_tensor(key))

    def scan(processes: int) -> None:
        assert not hfpatch.scan(path, processes=processes).findings

    passes = {f"aminmax, {n} thread{'s' * (n > 1)}": partial(bare, n) for n in counts}
    scans = {f"scan, {n} process{'es' * (n > 1)}": partial(scan, n) for n in counts}
    variants = {variant: timed(variant, action) for variant, action in {**passes, **scans}.items()}
    alternate(1, variants)
    spent.clear()
    times = alternate(rounds, variants)
    rows: list[Row] = []
    one = next(iter(passes))
    for variant, seconds in times.items():
        mine = variant in scans
        row: Row = {"files": name, "variant": variant, "s": median(seconds), "processor s": median(spent[variant])}
        row["GB/s"] = size / median(seconds) / 1e9
        row["of aminmax, 1 thr., processor"] = ratio(spent[one], spent[variant]) if mine else None
        row["of aminmax, 1 thr."] = ratio(times[one], seconds) if mine else None
        row["quartiles, 1 thr."] = spread(times[one], seconds) if mine else None
        many = f"aminmax, {counts[-1]} threads" if mine and len(counts) > 1 else None
        row["of aminmax, all thr."] = ratio(times[many], seconds) if many else None
        row["within target"] = ratio(times[one], seconds) >= SPEED if mine else None
        row["processor within"] = ratio(spent[one], spent[variant]) >= SPEED if mine else None
        rows.append(row)
    return rows


def memory(path: Path, name: str, processes: int) -> Row:
    """Of a process that only scans, and of its workers."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PEAK, str(path), str(processes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    own, worker = (int(n) / 1e6 for n in done.stdout.split())
    together = own + (processes * worker if processes > 1 else 0)
    return {
        "files": name,
        "processes": processes,
        "own MB": own,
        "largest worker MB": worker or None,
        "together MB": together,
        "within target": together < MEGABYTES,
    }


if __name__ == "__main__":
    main()
