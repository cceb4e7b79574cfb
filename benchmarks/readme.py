"""Writes the figures of the README from benchmarks/results: `python benchmarks/readme.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: made by benchmarks/readme.py -->", "<!-- end of figures -->"

SCRIPT = "`benchmarks/coverage.py`"

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
    quality, speed, host, cli = read("gemma_fp16-abcd-h100"), read("gemma_fp16-e-h100"), read("engine"), read("cli")
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
        host_line(host) + " " + cli_line(cli),
        "",
        coverage_line(read("coverage")),
    ]
    return "\n".join(lines)


def coverage_line(coverage: dict[str, Any]) -> str:
    """What is covered of the architectures that transformers has."""
    counts = [
        f"of {r['architectures']} {r['mapping']} architectures {r['tiny model trains']} train as tiny models, in "
        f"{r['LoRA reaches what is named']} PEFT adapts exactly the LoRA targets, in {r['float16 streams cured']} "
        f"every float16 stream, towers included, is widened or cannot overflow ({r['of these harmless']} need nothing)"
        for r in coverage["rows"]
    ]
    return f"transformers {coverage['versions']['transformers']} ({SCRIPT}): " + "; ".join(counts) + "."


def host_line(host: dict[str, Any]) -> str:
    """Cost of the engine."""
    warm = next(r for r in host["warm"]["times"] if r["modules"] > 1200 and r["modules"] < 1300)
    return (
        f"Plan, apply and revert of everything on a {warm['modules']:,}-module model: "
        f"{warm['together ms']:.0f} ms warm, "
        "no tensor added."
    )


def cli_line(cli: dict[str, Any]) -> str:
    """Cost of the command line."""
    ratios = {r["command"].split()[0]: r["ratio"] for r in cli["light"]}
    return (
        f"`hfpatch list` takes {ratios['list']:.1f} times as long as importing typer and rich, "
        f"`explain` {ratios['explain']:.1f} times."
    )


def filled(text: str) -> str:
    """The README with the figures in it."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{figures()}\n{END}{after}"


if __name__ == "__main__":
    file = ROOT / "README.md"
    file.write_text(filled(file.read_text()))
