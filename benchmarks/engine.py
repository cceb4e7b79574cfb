"""What plan, apply and revert cost on a deep model: time, growth with depth, memory left behind.

    OMP_NUM_THREADS=1 python benchmarks/engine.py

Target: plan + apply + revert of everything under 100 ms on about 1,200 modules, warm; no new tensor.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import pstats
import time
import tracemalloc
from itertools import pairwise
from typing import Any

from common import Row, cpu_name, header, median, ratio, spread, table, write_json

LAYERS = 92
TARGET_MS = 100.0
MORE = 20

Times = dict[str, float]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="also print the N dearest functions")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    facts = header("Engine: plan, apply, revert", cpu_name(), "torch", "transformers", "hfpatch")
    models = {depth: llama(depth) for depth in (LAYERS // 2, LAYERS, LAYERS * 2)}
    facts["first call"] = first_calls(models)
    facts["warm"] = warm(models, args.rounds)
    facts["memory"] = memory(models[LAYERS])
    if args.profile:
        profile(models[LAYERS], args.profile)
    write_json(args.json, facts)


def llama(layers: int) -> Any:
    """A float16 Llama of tiny widths; thirteen modules a layer and seven around."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).half().eval()


def modules(model: Any) -> int:
    """Number of modules."""
    return sum(1 for _ in model.modules())


def phases(model: Any, include: str | None) -> Times:
    """Milliseconds of plan, apply and revert, and of one bare walk over the modules.

    `apply` plans again, as it does for a user.
    """
    import hfpatch

    start = time.perf_counter()
    hfpatch.plan(model, include=include)
    planned = time.perf_counter()
    handle = hfpatch.apply(model, verbose=False, include=include)
    applied = time.perf_counter()
    handle.revert()
    done = time.perf_counter()
    dict(model.named_modules())
    walked = time.perf_counter() - done
    times = {"plan": planned - start, "apply": applied - planned, "revert": done - applied, "together": done - start}
    times["walk"] = walked
    return {name: seconds * 1e3 for name, seconds in times.items()}


def first_calls(models: dict[int, Any]) -> list[Row]:
    """The first call of the process, then the first at each other depth; torch and transformers are imported."""
    start = time.perf_counter()
    import hfpatch

    _ = hfpatch.plan, hfpatch.apply
    imported = (time.perf_counter() - start) * 1e3
    order = sorted(models, key=lambda depth: depth != LAYERS)
    rows: list[Row] = []
    for depth in order:
        times = phases(models[depth], None)
        which = "first of the process" if depth == LAYERS else "first at this depth"
        rows.append({"call": which, "layers": depth, "modules": modules(models[depth]), **_ms(times)})
    table(
        "First calls",
        rows,
        f"Importing the engine took {imported:.0f} ms before that (torch and transformers were there).",
    )
    return rows


def warm(models: dict[int, Any], rounds: int) -> dict[str, list[Row]]:
    """Every depth, bare and with all that is suggested, in turn, in one run, after a warm-up."""
    wanted: dict[str, str | None] = {"bare": None, "suggested": "suggested"}
    runs: dict[tuple[str, int], list[Times]] = {(name, depth): [] for name in wanted for depth in models}
    for turn in range(rounds + 1):
        for (name, depth), found in runs.items():
            times = phases(models[depth], wanted[name])
            if turn:
                found.append(times)
    rows: list[Row] = [
        {
            "apply": name,
            "layers": depth,
            "modules": modules(models[depth]),
            "edits": edits(models[depth], wanted[name]),
            **_ms({phase: median(one[phase] for one in found) for phase in found[0]}),
            "together / walk": ratio([one["together"] for one in found], [one["walk"] for one in found]),
        }
        for (name, depth), found in runs.items()
    ]
    growth = [
        _growth(name, runs[name, deep], runs[name, shallow], models[deep], models[shallow], phase)
        for name in wanted
        for shallow, deep in pairwise(models)
        for phase in ("plan", "apply", "revert", "together")
    ]
    together = max(row["together ms"] for row in rows if row["layers"] == LAYERS)
    met = "met" if together < TARGET_MS else "MISSED"
    table(
        f"Warm, median of {rounds} rounds",
        rows,
        f"Together at {LAYERS} layers: {together:.1f} ms; target, under {TARGET_MS:.0f} ms: {met}.",
        'Bare: `apply(model)`. Suggested: `include="suggested"`, every patch whose condition holds. '
        "Walk: one `dict(model.named_modules())` in the same round; the ratio to it depends little on the machine.",
    )
    table("Growth with depth (paired; linear where per module is 1)", growth)
    return {"times": rows, "growth": growth}


def _growth(name: str, deep: list[Times], shallow: list[Times], big: Any, small: Any, phase: str) -> Row:
    a, b = [one[phase] for one in deep], [one[phase] for one in shallow]
    factor = modules(big) / modules(small)
    return {
        "apply": name,
        "modules": f"{modules(big)} / {modules(small)}",
        "phase": phase,
        "time ratio": ratio(a, b),
        "quartiles": spread(a, b),
        "module ratio": factor,
        "per module": ratio(a, b) / factor,
    }


def edits(model: Any, include: str | None) -> int:
    """How many edits an apply makes."""
    import hfpatch

    return len(hfpatch.plan(model, include=include).edits)


def memory(model: Any) -> list[Row]:
    """Python memory that an apply adds, with and without the handle, what a revert leaves, and new tensors."""
    import hfpatch

    hfpatch.apply(model, verbose=False).revert()
    gc.collect()
    tensors = count_tensors()
    objects = len(gc.get_objects())
    tracemalloc.start()
    empty = traced()
    handle = hfpatch.apply(model, verbose=False)
    number = len(handle.edits)
    held = traced() - empty
    new_tensors = count_tensors() - tensors
    del handle
    carried = traced() - empty
    hfpatch.revert(model)
    left = traced() - empty
    for _ in range(MORE):
        hfpatch.apply(model, verbose=False).revert()
    tracemalloc.stop()
    gc.collect()
    objects = len(gc.get_objects()) - objects
    rows: list[Row] = [
        {"what": "new tensors", "value": new_tensors, "per edit": None},
        {"what": "KiB with the handle held", "value": held / 1024, "per edit": held / 1024 / max(number, 1)},
        {
            "what": "KiB carried by the model alone",
            "value": carried / 1024,
            "per edit": carried / 1024 / max(number, 1),
        },
        {"what": "KiB left after revert", "value": left / 1024, "per edit": None},
        {"what": f"objects left after {MORE} more rounds", "value": objects, "per edit": None},
    ]
    table(
        f"Memory added by apply ({modules(model)} modules, {number} edits)",
        rows,
        "Target: no new tensor. What a revert leaves is slack in dict tables that had held records and hooks.",
    )
    return rows


def traced() -> int:
    """Bytes of Python memory in use, after a collection."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def count_tensors() -> int:
    """Tensor objects that are alive."""
    import torch

    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def profile(model: Any, top: int) -> None:
    """The dearest functions of ten plan + apply + revert, by own time and with what they call."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(10):
        phases(model, None)
    profiler.disable()
    for key in ("tottime", "cumtime"):
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).strip_dirs().sort_stats(key).print_stats(top)
        print(f"\n## Profile of ten rounds, by {key}\n\n```\n{text.getvalue().strip()}\n```")


def _ms(times: Times) -> Row:
    return {f"{name} ms": value for name, value in times.items()}


if __name__ == "__main__":
    main()
