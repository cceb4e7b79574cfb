"""Expanding a LoRA adapter against PEFT injecting the same modules: time on a deep model, paired.

    OMP_NUM_THREADS=1 python benchmarks/lora_expansion.py

Target: the write of an expansion at most 1.2 times PEFT's own injection of the same modules, on about
1,200 modules. The plan that says what is missing, and a revert, are shown beside it.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from common import Row, alternate, cpu_name, header, median, ratio, spread, table, write_json
from engine import LAYERS, llama, modules

TARGET = 1.2
REST = ["k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ID = "lora-target-expansion"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    facts = header("LoRA expansion against PEFT's injection", cpu_name(), "torch", "transformers", "peft", "hfpatch")
    facts["rows"] = measure(args.rounds)
    write_json(args.json, facts)


def measure(rounds: int) -> list[Row]:
    """PEFT injects the five missing names into a model without adapters; hfpatch adds them to one with q and v."""
    from peft import LoraConfig, get_peft_model

    import hfpatch

    plain: Any = llama(LAYERS)
    size = modules(plain)
    expanded: Any = get_peft_model(llama(LAYERS), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    last: dict[str, float] = {}
    added: dict[str, int] = {}

    def peft() -> float:
        start = time.perf_counter()
        model = get_peft_model(plain, LoraConfig(r=8, target_modules=REST))
        took = time.perf_counter() - start
        added["peft"] = sum(p.numel() for n, p in model.named_parameters() if "lora_" in n)
        model.unload()
        return took * 1e3

    def whole() -> float:
        start = time.perf_counter()
        made = hfpatch.plan(expanded, only=ID)
        planned = time.perf_counter()
        fix = hfpatch.apply(expanded, only=ID, verbose=False)
        applied = time.perf_counter()
        added["hfpatch"] = sum(p.numel() for p in fix.new_parameters)
        assert made.edits
        fix_end = time.perf_counter()
        fix.revert()
        last["plan"] = (planned - start) * 1e3
        last["revert"] = (time.perf_counter() - fix_end) * 1e3
        return (applied - planned) * 1e3

    parts: dict[str, list[float]] = {"plan": [], "revert": []}

    def timed() -> float:
        took = whole()
        for name, values in parts.items():
            values.append(last[name])
        return took

    for one in (peft, whole):  # warm
        one()
    found = alternate(rounds, {"PEFT, inject": peft, "hfpatch, apply (its plan included)": timed})
    assert added["peft"] == added["hfpatch"]
    base = found["PEFT, inject"]
    times = {**found, "hfpatch, plan alone": parts["plan"], "hfpatch, revert": parts["revert"]}
    write = [a - p for a, p in zip(found["hfpatch, apply (its plan included)"], parts["plan"], strict=True)]
    times["hfpatch, apply less its plan"] = write
    rows: list[Row] = [
        {
            "what": name,
            "modules": size,
            "layers added": len(REST) * LAYERS,
            "ms": median(values),
            "against PEFT": ratio(values, base),
            "quartiles": spread(values, base),
        }
        for name, values in times.items()
    ]
    got = ratio(found["hfpatch, apply (its plan included)"], base)
    verdict = "met" if got <= TARGET else "MISSED"
    table(
        f"Median of {rounds} rounds",
        rows,
        f"Apply, plan included, against PEFT: {got:.2f}; target, at most {TARGET}: {verdict}.",
    )
    return rows


if __name__ == "__main__":
    main()
