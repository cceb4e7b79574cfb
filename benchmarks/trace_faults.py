"""Planted faults over many architectures: who names the module and the operation.

    OMP_NUM_THREADS=1 python benchmarks/trace_faults.py

Each fault of `benchmarks/planted.py` is run once under each tool. `rightly`: hfpatch names the module, the operation
and the cause; detect_anomaly the backward function (it names no module); DebugUnderflowOverflow the module (it names no
operation); DebugMode has it first in its list. `wrongly`: it names another. `missed`: it says nothing. An exception
that is the model's own is no word of a tool.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

from common import Row, cpu_name, header, table, write_json

ANSWERS = ("rightly", "wrongly", "missed")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults with this in their name")
    parser.add_argument("--ours", action="store_true", help="leave out the other tools")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()

    import torch
    from planted import FAULTS

    torch.set_num_threads(1)
    facts = header("Planted faults", cpu_name(), "torch", "transformers", "peft", "hfpatch")
    tools: dict[str, Callable[[Any], tuple[str, str]]] = {"hfpatch": ours}
    if not args.ours:
        tools |= {"detect_anomaly": anomaly, "DebugUnderflowOverflow": underflow, "DebugMode": debug_mode}
    rows: list[Row] = []
    said: list[Row] = []
    for fault in FAULTS:
        if args.only not in fault.name:
            continue
        row: Row = {"fault": fault.name, "phase": fault.phase}
        for name, tool in tools.items():
            start = time.perf_counter()
            torch.manual_seed(0)
            with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
                warnings.simplefilter("ignore")
                row[name], words = tool(fault)
            gc.collect()
            if name == "hfpatch":
                said.append({"fault": fault.name, "hfpatch says": words, "s": time.perf_counter() - start})
        rows.append(row)
    totals = [
        {"tool": name, **{a: sum(r[name] == a for r in rows) for a in ANSWERS}, "of": len(rows)} for name in tools
    ]
    table("By tool", totals)
    table("By fault", rows)
    table("What hfpatch says", said)
    facts |= {"totals": totals, "faults": rows, "said": said}
    write_json(args.json, facts)


def ours(fault: Any) -> tuple[str, str]:
    """`hfpatch.trace`."""
    import hfpatch

    model, run = fault.make()
    raised = ""
    with hfpatch.trace(model) as t:
        raised = _quiet(run, getattr(t, "watch", lambda f: f))
    found = t.first_bad
    if found is None:
        return "missed", raised
    text = f"{found.operation} {found.tensor} {found.why}".lower()
    right = (
        found.module == fault.module
        and found.phase == ("backward" if fault.phase == "backward" else "forward")
        and (not fault.symptom or found.symptom == fault.symptom)
        and all(any(word.lower() in text for word in words.split("|")) for words in fault.words)
    )
    return ("rightly" if right else "wrongly"), f"{found.sentence} [{found.module}; {found.symptom}]"


def anomaly(fault: Any) -> tuple[str, str]:
    """`torch.autograd.detect_anomaly`: raises an error that names a backward function."""
    import torch

    _, run = fault.make()
    with torch.autograd.detect_anomaly():
        raised = _quiet(run, lambda f: f)
    if (named := re.search(r"Function '(\w+)' returned nan", raised)) is None:
        return "missed", raised
    return ("rightly" if named[1] == fault.node else "wrongly"), raised


def underflow(fault: Any) -> tuple[str, str]:
    """`transformers.debug_utils.DebugUnderflowOverflow`: prints the modules before the first bad value, and raises."""
    from transformers.debug_utils import DebugUnderflowOverflow

    model, run = fault.make()
    DebugUnderflowOverflow(model, max_frames_to_save=1)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        raised = _quiet(run, lambda f: f)
    if "inf/nan detected" not in raised:
        return "missed", raised
    frames = re.findall(r"^ {10,}(\S*) (\w+)$", printed.getvalue(), re.MULTILINE)
    named = frames[-1][0] if frames else ""
    return ("rightly" if named == fault.module and fault.phase == "forward" else "wrongly"), named


RUNS = {"Sqrt": "div", "Log": "div", "Pow": "pow", "Exp": "mul", "Reciprocal": "mul", "Mul": "mul", "Bad": "mul"}
"""Backward functions, and what they run."""


def debug_mode(fault: Any) -> tuple[str, str]:
    """`torch.utils._debug_mode.DebugMode`: lists every operation with a norm; it judges nothing.

    Its word is the first operation in the list whose norm is NaN, or else infinite, which a reader would have to find.
    In the forward pass it stands under its module, which must be right; in the backward pass the operation must be.
    """
    from torch.utils import _debug_mode

    _, run = fault.make()
    with _debug_mode.DebugMode(record_nn_module=True) as mode, _debug_mode.DebugMode.log_tensor_hashes(hash_fn="norm"):
        raised = _quiet(run, lambda f: f)
    lines = mode.debug_string().splitlines()
    at = next((n for word in ("nan", "inf") for n, line in enumerate(lines) if f"'hash': {word}" in line), None)
    if at is None:
        return "missed", raised
    depth = _depth(lines[at])
    above = [n for n in range(at) if "[nn.Mod]" in lines[n] and _depth(lines[n]) < depth]
    above = [n for n in above if all(_depth(line) > _depth(lines[n]) for line in lines[n + 1 : at + 1])]
    module = lines[above[-1]].split("] ", 1)[1].partition(".")[2] if above else None
    operation = lines[at].strip().partition("(")[0]
    if fault.phase == "backward":
        right = module is None and f"::{RUNS.get(fault.node.rpartition('Backward')[0], '-')}" in operation
    else:
        right = module == fault.module
    return ("rightly" if right else "wrongly"), f"{operation} under {module}"


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _quiet(run: Callable[..., Any], watch: Callable[..., Any]) -> str:
    """Run one step; return what it raised, in a line."""
    try:
        run(watch)
    except Exception as error:  # noqa: BLE001 (some of the steps raise, and some of the tools)
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ""


if __name__ == "__main__":
    main()
