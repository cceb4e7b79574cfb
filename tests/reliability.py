"""What was tried to break it: `python -m tests.reliability` writes benchmarks/results/reliability.json and .md.

It counts docs/state.json, which `python -m tests.matrix` writes, and the counts of `make fuzz`; and it calls every
public function with absurd values for each of its arguments.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.matrix import DATA

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
FUZZ, FILE = RESULTS / "fuzz-cpu.json", RESULTS / "reliability.json"
OUTCOMES = {"works": "work", "refused": "are refused with the reason", "untried": "untried", "FAILS": "fail"}
FAULTS = {"tracebacks": "tracebacks", "hangs": "hangs", "memory_over_1_gb": "took over 1 GB", "code_run": "ran code"}


def collected() -> dict[str, dict[str, int]]:
    """Return the counts that the files hold."""
    state, kinds = json.loads(DATA.read_text()), json.loads(FUZZ.read_text())["kinds"].values()
    outcomes = Counter(outcome for *_, outcome in state["cells"])
    interruptions = state["interruptions"].values()
    return {
        "cells of the table of states": {word: outcomes[outcome] for outcome, word in OUTCOMES.items()},
        "interruptions of apply and revert": {
            "tried": sum(each["tried"] for each in interruptions),
            "left something": sum(each["left"] for each in interruptions),
        },
        "mutated files": {
            "kinds": len(kinds),
            "mutations": sum(counts["mutations"] for counts in kinds),
            "refused with one sentence": sum(counts["refused"] for counts in kinds),
            "taken": sum(counts["taken"] for counts in kinds),
            **{word: sum(counts[key] for counts in kinds) for key, word in FAULTS.items()},
        },
    }


def called() -> dict[str, int]:
    """Call every public function with absurd arguments, and return the counts."""
    from tests import test_bad_input as bad

    os.environ["HF_HUB_OFFLINE"] = "1"
    calls, wrong = 0, 0
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        for name in bad.FUNCTIONS:
            for values in (bad.ABSURD, bad.ODDER):
                tried, found = bad.tried(name, values)
                calls, wrong = calls + tried, wrong + len(found)
    return {"functions": len(bad.FUNCTIONS), "calls": calls, "without a sentence": wrong}


def page(facts: dict[str, Any]) -> str:
    """Return the counts as tables in Markdown."""
    lines = ["# What was tried to break it", "", "Made by `python -m tests.reliability`.", ""]
    for title, counts in facts.items():
        lines += [f"| {title} | |", "|---|---|", *(f"| {word} | {count:,} |" for word, count in counts.items()), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    found = {**collected(), "calls with absurd arguments": called()}
    FILE.write_text(json.dumps(found, indent=1) + "\n")
    FILE.with_suffix(".md").write_text(page(found))
    print(page(found))
