"""What the benchmarks share: the header that says what ran on what, markdown tables, medians, paired timing."""

from __future__ import annotations

import json
import math
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # a checkout need not be installed
    sys.path.append(str(ROOT))

Row = dict[str, Any]


def header(title: str, device: str, *packages: str) -> dict[str, Any]:
    """Print, and return, what was run with which versions on which device. Paths in the command lose their folders."""
    facts: dict[str, Any] = {
        "title": title,
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(_bare, sys.argv[1:])]),
        "commit": _commit(),
        "device": device,
        "versions": {"python": platform.python_version(), **{p: version(p) for p in packages}},
    }
    print(f"# {title}\n")
    print(f"- command: `{facts['command']}`")
    print(f"- commit: {facts['commit']}")
    print(f"- device: {device}")
    print(f"- versions: {', '.join(f'{k} {v}' for k, v in facts['versions'].items())}", flush=True)
    return facts


def version(package: str) -> str:
    """Version of an installed package; of hfpatch also from a bare checkout."""
    if package == "hfpatch":
        import hfpatch

        return hfpatch.__version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def cpu_name() -> str:
    """Model of the processor and the number of cores this process may use."""
    import os

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}"


def table(title: str, rows: Sequence[Row], *notes: str) -> None:
    """Print rows of equal keys as a markdown table, with notes below."""
    print(f"\n## {title}\n")
    if rows:
        columns = list(rows[0])
        cells = [columns, ["---"] * len(columns), *([show(r.get(c)) for c in columns] for r in rows)]
        for line in cells:
            print(f"| {' | '.join(line)} |")
    for note in notes:
        print(f"\n{note}")
    sys.stdout.flush()


def show(value: Any) -> str:
    """A cell: four significant digits; `-` for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if not value or not math.isfinite(value):
            return "0" if not value else str(value)
        return f"{value:.4g}" if 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"
    return str(value).replace("|", "\\|")


def write_json(path: str | None, facts: dict[str, Any]) -> None:
    """Write facts as JSON, NaN and inf as text, if there is a path."""
    if path is not None:
        Path(path).write_text(json.dumps(_strict(facts), indent=1) + "\n")


def alternate(rounds: int, variants: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Run the variants in turn, A B A B, and collect what each returns."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            found[name].append(variant())
    return found


def median(values: Iterable[float]) -> float:
    """Median."""
    return statistics.median(values)


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """Median of the paired ratios."""
    return median(a / b for a, b in zip(values, base, strict=True))


def spread(values: Sequence[float], base: Sequence[float]) -> str:
    """Quartiles of the paired ratios, as text."""
    ratios = [a / b for a, b in zip(values, base, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return f"{low:.3f} to {high:.3f}"


def _bare(argument: str) -> str:
    return Path(argument).name if "/" in argument else argument


def _commit() -> str:
    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (
            ", with changes" if git("status", "--porcelain", "hfpatch", "patches") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown (no git here)"


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
