"""Writes the figures of the README from benchmarks/results: `python benchmarks/readme.py`."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: made by benchmarks/readme.py -->", "<!-- end of figures -->"

ROWS = {
    "fp16 stock": "fp16 weights, stock",
    "fp16 patched": "**fp16 weights, `hfpatch.apply`**",
    "bf16 weights": "bf16 weights",
    "bf16 + fp16 autocast": "bf16 weights, fp16 autocast",
    "fp32 + fp16 autocast": "fp32 weights, fp16 autocast",
}


def read(name: str) -> dict[str, Any]:
    """A results file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def figures() -> str:
    """The table and the lines under it."""
    quality, speed = read("gemma_fp16-abcd-h100"), read("gemma_fp16-e-h100")
    sdpa = {r["way"]: r for r in quality["a"] if r["attention"] == "sdpa"}
    steps = {r["way"]: r for r in speed["e"] if r["what"] != "inference"}
    errors = {r["way"]: r for r in quality["b"]}
    runs = {r["run"]: r for r in quality["c"]}
    lines = [
        "| | loss | KL to fp64 | top-1 | LoRA gradient error | LoRA step at 4 B | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for way, name in ROWS.items():
        a, e, b = sdpa[way], steps[way], errors.get(way)
        loss, kl = ("nan", "nan") if not a["finite"] else (f"{a['loss']:.3f}", f"{a['KL']:.1e}")
        error = f"{b['relative error']:.1e}" if b else "nan"
        lines.append(
            f"| {name} | {loss} | {kl} | {a['top-1']:.1%} | {error} | {e['ms']:.0f} ms | {e['peak GiB']:.1f} GiB |"
        )
    patched, stock, train = sdpa["fp16 patched"], runs["fp16 stock"], runs["fp16 patched, then PEFT"]
    inference = {r["way"]: r for r in speed["e"] if r["what"] == "inference"}
    lines += [
        "",
        f"Gemma 3 270M, its real weights, 4 x 512 tokens, {quality['device']}, torch {quality['versions']['torch']}, "
        f"transformers {quality['versions']['transformers']}; the last two columns are a 3.9 B Gemma 3 shape "
        "with random weights, 2 x 1,024 tokens, r 16.",
        f"Patched against stock, in turn on one model: "
        f"{steps['fp16 patched']['time / stock']:.2f} times the LoRA step, "
        f"{inference['fp16 patched']['time / stock']:.2f} times the forward pass, "
        f"{steps['fp16 patched']['peak / stock']:.2f} times the peak memory.",
        f"{train['steps']} LoRA steps with a GradScaler: {stock['non-finite losses']} NaN losses stock, "
        f"{train['non-finite losses']} patched (last-10 loss {train['last-10 loss']:.3f}; fp32 "
        f"{runs['fp32']['last-10 loss']:.3f}, bf16 {runs['bf16']['last-10 loss']:.3f}). "
        f"The patched KL is {sdpa['bf16 weights']['KL'] / patched['KL']:.0f} times smaller than that of bf16 weights.",
        "",
        coverage_line(read("coverage")),
        "",
        *questions(steps["fp16 patched"], inference["fp16 patched"], speed["device"]),
    ]
    return "\n".join(lines)


def coverage_line(coverage: dict[str, Any]) -> str:
    """What is covered of the architectures that transformers has."""
    counts = ", ".join(f"{r['architectures']} {r['mapping']}" for r in coverage["rows"])
    return (
        f"How many of the architectures of transformers {coverage['versions']['transformers']} ({counts}) train, take "
        "LoRA and are served in float16: [benchmarks/results/coverage.md](benchmarks/results/coverage.md)."
    )


def questions(step: dict[str, Any], forward: dict[str, Any], card: str) -> list[str]:
    """What is asked next, each with a line from a run."""
    guard = next(r for r in read("guard-h200")["rows"] if r["variant"] == "guard")
    warm = next(r for r in read("engine")["warm"]["times"] if 1200 < r["modules"] < 1300)
    stranger = read("stranger-cpu")
    said = {r["step"]: r["said"] for r in stranger["rows"]}
    small = read("evidence-h200")
    slowest = max(small["models"], key=lambda m: m["forward time, patched / stock"])
    seconds, load = stranger["first sentence"], max(stranger["load average"])
    asked = {
        "Does it slow me down?": f"A LoRA step {step['time / stock']:.2f} times stock, a forward pass "
        f"{forward['time / stock']:.2f} times ({card}, 4 B). A small model more: {slowest['model']} runs "
        f"{slowest['forward time, patched / stock']:.1f} and trains {slowest['step time, patched / stock']:.1f} times "
        f"as long ({small['device']}). With the guard {guard['against clip_grad_norm_']:.3f} times a "
        f"step that clips ({read('guard-h200')['device']}). Plan, apply and revert on {warm['modules']:,} modules: "
        f"{warm['together ms']:.0f} ms.",
        "Does it change my checkpoint?": f"No: {said['the checkpoint']}. The plan marks patches that write weights "
        "(`reinitialises`, `adds-parameters`); they run by name or on what is provably untrained.",
        "How do I undo it?": "`fix.revert()`, or `hfpatch.revert(model)` in any process: the outputs are the stock "
        "ones bit for bit, NaN included.",
        "Which GPUs?": f"Measured on {', '.join(devices())}; no other was tried.",
        "Which releases?": f"{releases()}; CI runs both ends, and a newer release is proved or refused by the plan: "
        "[releases](docs/releases.md).",
        "How soon does it say something?": f"{seconds['of the process']:.0f} s from starting Python to the first "
        f"sentence about a model of one's own, {seconds['from the install']:.0f} s from an empty environment "
        f"({', '.join(stranger['device'].split(', ')[:2])}, load average up to {load:.0f}).",
        "How reliable is it?": reliability(read("reliability")),
    }
    return ["| | |", "|---|---|", *(f"| {question} | {answer} |" for question, answer in asked.items())]


def reliability(found: dict[str, dict[str, int]]) -> str:
    """What was tried to break it."""
    cells, stops, files, calls = found.values()
    faults = ", ".join(f"{files[word]} {word}" for word in ("tracebacks", "hangs", "took over 1 GB", "ran code"))
    return (
        f"Of {sum(cells.values())} cells of [the table of states](docs/state.md) "
        + ", ".join(f"{count} {word}" for word, count in cells.items())
        + f". {stops['tried']:,} interruptions of apply and revert, {stops['left something']} left something. "
        f"{files['mutations']:,} mutated files of {files['kinds']} kinds: {faults}. "
        f"{calls['calls']:,} calls with absurd arguments, {calls['without a sentence']} without a sentence. "
        "[All counts](benchmarks/results/reliability.md)."
    )


def releases() -> str:
    """The window of releases that is tested."""
    found = tomllib.loads((ROOT / "releases.toml").read_text())
    low, high = found["lowest"], found["newest"]
    return ", ".join(f"{name} {low[name]} to {high[name]}" for name in ("torch", "transformers", "peft"))


def devices() -> list[str]:
    """The cards of the results, and the processors as one."""
    found = {json.loads(file.read_text()).get("device", "") for file in RESULTS.glob("*.json")}
    return [*sorted(name for name in found if name.startswith("NVIDIA")), "CPUs"]


def filled(text: str) -> str:
    """The README with the figures in it."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{figures()}\n{END}{after}"


if __name__ == "__main__":
    file = ROOT / "README.md"
    file.write_text(filled(file.read_text()))
