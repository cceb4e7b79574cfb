"""The first hour of a stranger, in seconds: a new environment, an install, a model and a patch of one's own.

    python benchmarks/stranger.py --json stranger-cpu.json

Each step is timed, and what hfpatch says is held against what is so. Needs a package index.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import ROOT, cpu_name, header, table, write_json

from tests.clean.environment import Environment, build

PAGE = ROOT / "docs" / "authoring.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    before = os.getloadavg()[0]
    facts = header("A stranger's first hour", cpu_name(), "torch", "transformers", "peft", "hfpatch")
    rows: list[dict[str, object]] = []

    def step(name: str, do: Callable[[], str]) -> None:
        start = time.perf_counter()
        said = do()
        rows.append({"step": name, "seconds": time.perf_counter() - start, "said": said, "true": None})

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (dist := folder / "dist").mkdir()
        (wheel,) = build(dist).glob("*.whl")
        environment = Environment(folder / "env")
        step("python -m venv", lambda: f"{len(Environment.made(environment.folder).versions())} packages")
        pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
        step("pip install torch", lambda: _installed(environment, pins, "torch"))
        step("pip install hfpatch, the wheel", lambda: _installed(environment, pins, str(wheel)))
        step("hfpatch demo", lambda: _demo(environment))
        started = time.perf_counter()
        lines = environment.run(str(ROOT / "benchmarks" / "stranger_model.py"), cwd=folder).splitlines()
        own = [json.loads(line) for line in lines if line.startswith("{")]
        took = time.perf_counter() - started
        last = 0.0
        for line in own:
            rows.append({"step": line["step"], "seconds": line["s"] - last, "said": line["said"], "true": line["true"]})
            last = line["s"]
        patch, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
        (folder / "logit_cap.py").write_text(patch)
        step("a patch of one's own, tried", lambda: _verified(environment, folder))
        versions = environment.versions()
    facts["versions"] |= {name: versions[name] for name in ("torch", "transformers", "peft")}
    facts["rows"] = rows
    seconds = {row["step"]: row["seconds"] for row in rows}
    first = own[1]["s"]
    facts["first sentence"] = {
        "of the process": first,
        "from the install": sum(v for k, v in seconds.items() if k.startswith(("python", "pip"))) + first,
        "the whole script": took,
    }
    table("Step by step", rows)
    facts["load average"] = [before, os.getloadavg()[0]]
    note = f"Load average before and after: {before:.1f}, {facts['load average'][1]:.1f}."
    table("Seconds to the first true sentence about the model", [facts["first sentence"]], note)
    write_json(given.json, facts)
    assert all(line["true"] for line in own), "hfpatch said something that is not so"


def _installed(environment: Environment, pins: list[str], what: str) -> str:
    environment.install(what, constraints=pins)
    return f"{len(environment.versions())} packages"


def _demo(environment: Environment) -> str:
    said = environment.run("-m", "hfpatch.cli", "demo")
    assert "no patch of hfpatch is applied" in said
    return next(line for line in said.splitlines() if line.startswith("hfpatch: "))


def _verified(environment: Environment, folder: Path) -> str:
    said = environment.run("-m", "hfpatch.cli", "verify", "logit_cap.py", cwd=folder)
    assert "failed" not in said, said
    return said.splitlines()[0]


if __name__ == "__main__":
    main()
