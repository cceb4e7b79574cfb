"""What it takes to say which modules LoRA should reach: time of `lora_targets` on deep models.

    OMP_NUM_THREADS=1 python benchmarks/lora_targets.py

Target: at most 50 ms on a model of about 1,200 modules, by the clock; beside it the processor's time, which a
machine that is shared with others lengthens less. Beside it a mixture of experts of that size and one with
adapters already in it; and, for scale, one bare walk over the modules and PEFT's own injection of the targets.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from common import Row, alternate, cpu_name, header, median, ratio, table, write_json
from engine import LAYERS, llama, modules

TARGET = 50.0
MOE_LAYERS = 70


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    facts = header("LoRA targets", cpu_name(), "torch", "transformers", "peft", "hfpatch")
    facts["rows"] = measure(args.rounds)
    write_json(args.json, facts)


def mixture() -> Any:
    """A Qwen3-MoE on meta, a tenth of its layers dense."""
    import torch
    from transformers import AutoModelForCausalLM

    from hfpatch.lab.tiny import tiny_config

    dense = list(range(0, MOE_LAYERS, 10))
    config = tiny_config("qwen3_moe", num_hidden_layers=MOE_LAYERS, mlp_only_layers=dense)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def measure(rounds: int) -> list[Row]:
    """Each model in turn, `rounds` times."""
    from peft import LoraConfig, get_peft_model

    from hfpatch.lora.targets import lora_targets

    plain, moe = llama(LAYERS), mixture()
    held: Any = get_peft_model(llama(LAYERS), LoraConfig(r=8, **lora_targets(plain).kwargs()))
    models = {"Llama": plain, "Qwen3-MoE, some layers dense": moe, "Llama with adapters": held}

    busy: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            start, used = time.perf_counter(), time.process_time()
            call()
            busy.setdefault(name, []).append((time.process_time() - used) * 1e3)
            return (time.perf_counter() - start) * 1e3

        return run

    def inject() -> None:
        get_peft_model(plain, LoraConfig(r=8, **lora_targets(plain).kwargs())).unload()  # pyright: ignore[reportCallIssue]

    calls: dict[str, Callable[[], object]] = {
        **{f"lora_targets, {name}": lambda model=model: lora_targets(model) for name, model in models.items()},
        "one walk over the modules, Llama": lambda: list(plain.named_modules()),
        "PEFT injects the targets and takes them out, Llama": inject,
    }
    found = {name: timed(name, call) for name, call in calls.items()}
    for run in found.values():  # warm: the first call reads sources and imports peft
        run()
    times = alternate(rounds, found)
    base = times["lora_targets, Llama"]
    sizes = {f"lora_targets, {name}": modules(model) for name, model in models.items()}
    rows: list[Row] = [
        {
            "what": name,
            "modules": sizes.get(name, modules(plain)),
            "ms": median(values),
            "least ms": min(values),
            "processor ms": median(busy[name][1:]),
            "against lora_targets": ratio(values, base),
        }
        for name, values in times.items()
    ]
    got = median(base)
    verdict = "met" if got <= TARGET else "MISSED"
    table(f"Median of {rounds} rounds", rows, f"{got:.1f} ms; target, at most {TARGET:.0f} ms: {verdict}.")
    return rows


if __name__ == "__main__":
    main()
