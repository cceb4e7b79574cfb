"""What the command line costs as a whole process: wall time against its floor, and peak memory.

    OMP_NUM_THREADS=1 python benchmarks/cli.py

`list`, `explain` and `--help` are paired with a process that imports typer and rich (target: at most 2.0 x
its time); `inspect` of a DeepSeek-V3 config with one that imports torch and transformers and builds the same
class on meta (target: at most 0.3 s more, peak memory under 450 MB). Processes run in turn, A B A B.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, Row, cpu_name, header, median, ratio, spread, table, write_json

RATIO, SECONDS, MEGABYTES = 2.0, 0.3, 450.0

TYPER = ("-c", "import typer, rich.table, rich.console")
EMPTY = (
    "-c",
    "import typer, rich.table, rich.console\n"
    "app = typer.Typer(add_completion=False)\n"
    "app.command()(lambda: None)\n"
    "@app.command('two')\n"
    "def two(name: str | None = None, json: bool = False) -> None: ...\n"
    "app(['two'])",
)
META = (
    "-c",
    "import sys, torch, transformers\n"
    "config = transformers.DeepseekV3Config.from_pretrained(sys.argv[1])\n"
    "with torch.device('meta'):\n"
    "    transformers.DeepseekV3ForCausalLM(config)",
)


@dataclass(frozen=True)
class Run:
    """One finished process."""

    seconds: float
    cpu: float
    """Seconds of processor time, user and system: it counts no waiting for a core."""
    megabytes: float
    """Largest resident set, in units of 1e6 bytes."""


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()

    facts = header("Command line: whole processes", cpu_name(), "torch", "transformers", "typer", "rich", "hfpatch")
    facts["light"] = light(args.pairs)
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder)
        facts["inspect"] = inspect(args.pairs, folder)
    write_json(args.json, facts)


def hfpatch(*args: str) -> tuple[str, ...]:
    """Arguments of python that run a verb."""
    return ("-m", "hfpatch.cli", *args)


def light(pairs: int) -> list[Row]:
    """The verbs that import no torch."""
    commands = {
        "list": hfpatch("list"),
        "explain fp16-residual-overflow": hfpatch("explain", "fp16-residual-overflow"),
        "--help": hfpatch("--help"),
        "a typer command that does nothing": EMPTY,
        "import typer, rich again (noise)": TYPER,
    }
    rows: list[Row] = []
    for name, command in commands.items():
        mine, floor = paired(command, TYPER, pairs)
        times, base = [r.seconds for r in mine], [r.seconds for r in floor]
        cpu = ratio([r.cpu for r in mine], [r.cpu for r in floor])
        rows.append(
            {
                "command": name,
                "ms": median(times) * 1e3,
                "floor ms": median(base) * 1e3,
                "ratio": ratio(times, base),
                "quartiles": spread(times, base),
                "CPU ratio": cpu,
                "peak MB": median(r.megabytes for r in mine),
                "floor peak MB": median(r.megabytes for r in floor),
                f"<= {RATIO} x": ratio(times, base) <= RATIO,
            }
        )
    table(f"Against importing typer and rich, {pairs} pairs", rows)
    return rows


def inspect(pairs: int, folder: str) -> list[Row]:
    """`inspect` of a config.json against its floor."""
    mine, floor = paired(hfpatch("inspect", folder), (*META, folder), pairs)
    more = [a.seconds - b.seconds for a, b in zip(mine, floor, strict=True)]
    low, _, high = statistics.quantiles(more, n=4)
    peak = max(r.megabytes for r in mine)
    rows: list[Row] = [
        {
            "command": "inspect (DeepSeek-V3 config)",
            "s": median(r.seconds for r in mine),
            "floor s": median(r.seconds for r in floor),
            "difference s": median(more),
            "quartiles": f"{low:.3f} to {high:.3f}",
            "CPU s more": median(a.cpu - b.cpu for a, b in zip(mine, floor, strict=True)),
            "peak MB": peak,
            "floor peak MB": max(r.megabytes for r in floor),
            f"<= {SECONDS} s more": median(more) <= SECONDS,
            f"< {MEGABYTES:.0f} MB": peak < MEGABYTES,
        }
    ]
    table(f"Against importing torch and transformers and building the class on meta, {pairs} pairs", rows)
    return rows


def paired(a: Sequence[str], b: Sequence[str], pairs: int) -> tuple[list[Run], list[Run]]:
    """Run two commands of this python in turn; the first of each, which fills caches, does not count."""
    run(a)
    run(b)
    runs = [(run(a), run(b)) for _ in range(pairs)]
    return [first for first, _ in runs], [second for _, second in runs]


def run(command: Sequence[str]) -> Run:
    """Run this python with arguments to its end, outside the checkout.

    Raises:
        SystemExit: It failed; its last words are shown.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.DEVNULL, stderr=errors, env=env, cwd=tempfile.gettempdir()
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            errors.seek(0)
            raise SystemExit(
                f"python {' '.join(command)}: exit code {process.returncode}\n{errors.read().decode()[-2000:]}"
            )
    unit = 1 if sys.platform == "darwin" else 1024
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit / 1e6)


def write_config(folder: str) -> None:
    """The config.json of DeepSeek-V3, from transformers' own defaults."""
    script = (
        "import sys, transformers\n"
        "config = transformers.DeepseekV3Config(architectures=['DeepseekV3ForCausalLM'])\n"
        "config.save_pretrained(sys.argv[1])"
    )
    run(("-c", script, folder))
    if not (Path(folder) / "config.json").is_file():
        raise SystemExit("transformers wrote no config.json")


if __name__ == "__main__":
    main()
