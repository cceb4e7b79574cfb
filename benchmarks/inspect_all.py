"""What `hfpatch inspect --all` costs: wall time, processor time and memory of all its processes together.

    OMP_NUM_THREADS=1 python benchmarks/inspect_all.py

Targets: under 90 s on two cores, under 1.5 GB. Memory is the largest sum, at any tenth of a second, of what the
processes hold (shared pages counted for each, so an upper bound). A load average above 2, these two processes, means
that others had the cores as well: then the wall time is not this command's own, and the processor time is inflated.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, Row, cpu_name, header, table, write_json

SECONDS, MEGABYTES = 90.0, 1500.0


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()
    facts = header("inspect --all", cpu_name(), "torch", "transformers", "hfpatch")
    facts["run"] = run()
    table("Every architecture, from its default config", facts["run"])
    write_json(args.json, facts)


def run() -> list[Row]:
    """One run as a whole process.

    Raises:
        SystemExit: It failed.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryFile() as out:
        start, peak = time.perf_counter(), 0
        process = subprocess.Popen(
            [sys.executable, "-m", "hfpatch.cli", "inspect", "--all", "--json"], stdout=out, env=env
        )
        while process.poll() is None:
            peak = max(peak, sum(map(resident, tree(process.pid))))
            time.sleep(0.1)
        seconds = time.perf_counter() - start
        if process.returncode != 0:
            raise SystemExit(f"inspect --all: exit code {process.returncode}")
        out.seek(0)
        rows = json.load(out)["architectures"]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    built = sum("reason" not in row for row in rows.values())
    return [
        {
            "architectures": len(rows),
            "built": built,
            "s": seconds,
            "CPU s": cpu,
            "load average": os.getloadavg()[1],
            "peak MB": peak / 1e6,
            f"< {SECONDS:.0f} s": seconds < SECONDS,
            f"< {MEGABYTES:.0f} MB": peak / 1e6 < MEGABYTES,
        }
    ]


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):  # ended meanwhile
                continue
            below.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found.extend(below.get(one, ()))
    return found


def resident(pid: int) -> int:
    """Bytes a process holds in memory; none if it ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


if __name__ == "__main__":
    main()
