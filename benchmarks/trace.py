"""What a traced step costs, against the plain one and against the tools people use now, paired.

    OMP_NUM_THREADS=1 python benchmarks/trace.py
    python benchmarks/trace.py --device cuda
    OMP_NUM_THREADS=1 python benchmarks/trace.py --anchor-rounds 0 --host    (a minute or two)

Targets: blocks at most 1.03 times the plain step on a CPU and 1.08 on a GPU, every module 1.10 and 1.25; nothing once
off. On a GPU a traced step must synchronise once at most. Beside it runs the floor: hooks that append outputs and
gradients to a list and do nothing else. `--host` is a step on a CPU that the host bounds, as a small batch does on a
GPU: 22 layers, 32 wide, 8 tokens; it has no target. CPU: an 8-layer Llama, 256 wide, float32, 4 x 256 tokens, process
CPU time. GPU: a Llama of 1.1 B parameters, bfloat16, 4 x 1,024 tokens, wall time.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import time
import warnings
from collections.abc import Callable
from typing import Any

from common import Row, alternate, cpu_name, header, median, ratio, spread, table, write_json

SHAPES = {
    "cpu": {"hidden": 256, "intermediate": 688, "layers": 8, "heads": 8, "batch": 4, "tokens": 256, "vocabulary": 4096},
    "host": {"hidden": 32, "intermediate": 64, "layers": 22, "heads": 8, "batch": 1, "tokens": 8, "vocabulary": 128},
    "cuda": {
        "hidden": 2048, "intermediate": 5632, "layers": 22, "heads": 32, "batch": 4, "tokens": 1024, "vocabulary": 32000
    },
}  # fmt: skip
TARGETS = {
    "cpu": {"trace, blocks": 1.03, "trace, modules": 1.10},
    "host": {},
    "cuda": {"trace, blocks": 1.08, "trace, modules": 1.25},
}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--anchor-rounds", type=int, default=5, help="turns of the slow anchors; 0: without")
    parser.add_argument("--host", action="store_true", help="a step on a CPU that the host bounds")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()

    import torch

    if args.host:
        args.device = "host"
    if args.device != "cuda":
        torch.set_num_threads(1)
    name = cpu_name() if args.device != "cuda" else torch.cuda.get_device_name()
    facts = header("A traced training step", name, "torch", "transformers", "hfpatch")
    facts["shape"] = SHAPES[args.device]
    facts["ours"] = ours(args)
    facts["inside"] = inside(args)
    if args.anchor_rounds:
        facts["anchors"] = anchors(args)
    if args.device == "cuda":
        facts["synchronisations"] = synchronisations(args)
    write_json(args.json, facts)


def build(device: str) -> tuple[Any, Any]:
    """Model and token ids."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = SHAPES[device]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape["vocabulary"], hidden_size=shape["hidden"], intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"],
        num_key_value_heads=max(4, shape["heads"] // 8), tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device("cuda" if device == "cuda" else "cpu"):
        model = LlamaForCausalLM._from_config(config, dtype=dtype).train()
        ids = torch.randint(0, shape["vocabulary"], (shape["batch"], shape["tokens"]))
    return model, ids


def step(model: Any, ids: Any) -> None:
    """Forward and backward."""
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids).loss.backward()


def timer(device: str, run: Callable[[], None]) -> Callable[[], float]:
    """One run in milliseconds: of this process on a CPU, by the clock on a GPU."""
    import torch

    def timed() -> float:
        gc.collect()
        if device != "cuda":
            start = time.process_time()
            run()
            return (time.process_time() - start) * 1e3
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    return timed


def ours(args: Any) -> list[Row]:
    """The tracer, all its statistics, in turn with the plain step on one model."""
    import torch

    import hfpatch
    from hfpatch.tracing.watched import places

    model, ids = build(args.device)
    params = sum(p.numel() for p in model.parameters())
    counts: dict[str, int] = {}

    def traced(level: Any) -> Callable[[], None]:
        """Entered once, and on for the steps run by this; the hooks are set and taken off each time."""
        state = {"on": False}
        trace = hfpatch.trace(model, level=level, steps=lambda _: state["on"])
        trace.__enter__()

        def run() -> None:
            state["on"] = True
            step(model, ids)
            state["on"] = False
            counts[f"trace, {level}"] = len(trace.steps[-1].events)
            trace.steps.clear()

        return run

    def floor(level: str) -> Callable[[], None]:
        chosen = places(model)
        listed = [*chosen.containers.values(), *chosen.blocks.values()]
        listed += chosen.inner.values() if level == "modules" else []
        found: list[Any] = []

        def hook(_module: Any, _args: Any, output: Any) -> None:
            first = output if isinstance(output, torch.Tensor) else next(iter(output), None)
            found.append(first)
            if isinstance(first, torch.Tensor) and first.requires_grad:
                first.register_hook(found.append)

        def run() -> None:
            handles = [module.register_forward_hook(hook) for module in listed]
            step(model, ids)
            for handle in handles:
                handle.remove()
            found.clear()

        return run

    def off() -> Callable[[], None]:
        trace = hfpatch.trace(model, steps=[0])
        trace.__enter__()
        for _ in range(3):
            step(model, ids)
        assert len(trace.steps) == 1
        return lambda: step(model, ids)

    def plain() -> None:
        step(model, ids)

    runs = {
        "plain": plain,
        "plain again": plain,
        "trace, blocks": traced("blocks"),
        "trace, modules": traced("modules"),
        "only append, blocks": floor("blocks"),
        "only append, modules": floor("modules"),
        "trace, after its last step": off(),
    }
    variants = {name: timer(args.device, run) for name, run in runs.items()}
    alternate(3, variants)
    found = alternate(args.rounds, variants)
    rows = rows_of(found, args.device, counts)
    table(
        f"The tracer, {params / 1e6:,.0f} M parameters",
        rows,
        "Forward and backward. Parameters are measured when they changed; nothing steps here, so once.",
    )
    return rows


def inside(args: Any) -> list[Row]:
    """Time spent in the tracer's own code by part, as a share of the plain steps between: noise of the machine cancels.

    The wait for a GPU before the rows are read is left out: the plain step waits for it too.
    """
    import torch

    import hfpatch
    from hfpatch.numerics.statistics_lots import Lots
    from hfpatch.tracing.events import Step
    from hfpatch.tracing.growing.growth import Growth
    from hfpatch.tracing.trace import Trace
    from hfpatch.tracing.watch import Watch

    model, ids = build(args.device)
    plain = timer(args.device, lambda: step(model, ids))
    clock = time.perf_counter if args.device == "cuda" else time.process_time
    parts: dict[str, float] = {}
    within: list[float] = []  # time in the functions that each function under way has called

    def counted(function: Any, part: str) -> Any:
        def run(*a: Any, **k: Any) -> Any:
            begun = clock()
            if part == "read" and args.device == "cuda":
                torch.cuda.synchronize()
            within.append(0.0)
            start = clock()
            try:
                return function(*a, **k)
            finally:
                now = clock()
                parts[part] = parts.get(part, 0.0) + (now - start - within.pop()) * 1e3
                if within:
                    within[-1] += now - begun

        return run

    names = {
        "weights": (Watch, ("start",)),
        "forward hooks": (Watch, ("called", "returned", "finish")),
        "backward hooks": (Watch, ("_gradient",)),
        "gradients of parameters": (Watch, ("_end_backward",)),
        "launches": (Lots, ("flush",)),
        "read": (Step, ("close",)),
        "growth": (Growth, ("finding",)),
        "other": (Trace, ("_called", "_returned", "_conclude")),
    }
    before = [(owner, name, getattr(owner, name), part) for part, (owner, all_) in names.items() for name in all_]
    rows: list[Row] = []
    try:
        for owner, name, function, part in before:
            setattr(owner, name, counted(function, part))
        for level in ("blocks", "modules"):
            state = {"on": False}
            trace = hfpatch.trace(model, level=level, steps=lambda _, state=state: state["on"])

            kept: list[dict[str, float]] = []

            def traced(
                trace: Any = trace, state: dict[str, bool] = state, kept: list[dict[str, float]] = kept
            ) -> float:
                parts.clear()
                state["on"] = True
                step(model, ids)
                state["on"] = False
                trace.steps.clear()
                kept.append(dict(parts))
                return sum(parts.values())

            with trace:
                alternate(2, {"plain": plain, "traced": traced})
                kept.clear()
                found = alternate(args.rounds, {"plain": plain, "traced": traced})
            share = [1 + t / p for t, p in zip(found["traced"], found["plain"], strict=True)]
            rows.append(
                {
                    "variant": f"trace, {level}",
                    **{part: median(t.get(part, 0.0) for t in kept) for part in names},
                    "1 + all / plain": median(share),
                    "target": TARGETS[args.device].get(f"trace, {level}"),
                }
            )
    finally:
        for owner, name, function, _ in before:
            setattr(owner, name, function)
    table("Time inside the tracer, ms", rows)
    return rows


def anchors(args: Any) -> list[Row]:
    """What people use now; each on a model of its own, because some cannot be taken off."""
    import torch
    from transformers.debug_utils import DebugUnderflowOverflow

    plain_model, ids = build(args.device)
    debug_model, _ = build(args.device)
    DebugUnderflowOverflow(debug_model, max_frames_to_save=1)
    naive_model, _ = build(args.device)
    for module in naive_model.modules():
        module.register_forward_hook(_naive)

    def anomaly() -> None:
        with warnings.catch_warnings(), torch.autograd.detect_anomaly():
            warnings.simplefilter("ignore")
            step(plain_model, ids)

    def debug() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            step(debug_model, ids)

    runs = {
        "plain": lambda: step(plain_model, ids),
        "DebugUnderflowOverflow (forward only)": debug,
        "torch.autograd.detect_anomaly": anomaly,
        "six .item() a module (forward only)": lambda: step(naive_model, ids),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        variants = {name: timer(args.device, run) for name, run in runs.items()}
        alternate(1, variants)
        rows = rows_of(alternate(args.anchor_rounds, variants), args.device, {})
    table("What people use now", rows)
    return rows


def _naive(_module: Any, _args: Any, output: Any) -> None:
    import torch

    values = output if isinstance(output, (tuple, list)) else [output]
    for x in values:
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            y = x.detach()
            for value in (y.isnan().any(), y.isinf().any(), y.min(), y.max(), y.mean(), y.std()):
                value.item()


def rows_of(found: dict[str, list[float]], device: str, counts: dict[str, int]) -> list[Row]:
    """Ratios to the plain step."""
    base = found["plain"]
    targets = TARGETS[device]
    return [
        {
            "variant": name,
            "ms": median(values),
            "against plain": ratio(values, base),
            "quartiles": spread(values, base),
            "tensors": counts.get(name),
            "target": targets.get(name),
        }
        for name, values in found.items()
    ]


def synchronisations(args: Any) -> list[Row]:
    """Times the host waits for the GPU in a traced step, as torch's own sync debug mode counts them."""
    import torch

    import hfpatch

    rows: list[Row] = []
    model, ids = build(args.device)

    def count(run: Callable[[], None]) -> int:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(w.message) for w in caught)

    step(model, ids)
    rows.append({"variant": "plain", "host waits in a step": count(lambda: step(model, ids))})
    for level in ("blocks", "modules"):
        with hfpatch.trace(model, level=level):
            step(model, ids)
            rows.append({"variant": f"trace, {level}", "host waits in a step": count(lambda: step(model, ids))})
    table("Synchronisations", rows)
    return rows


if __name__ == "__main__":
    main()
