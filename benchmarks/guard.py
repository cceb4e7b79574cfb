"""What the guard costs a training step, against clip_grad_norm_ and the same optimizer, paired.

    OMP_NUM_THREADS=1 python benchmarks/guard.py
    python benchmarks/guard.py --device cuda --dtype bfloat16 --hidden 2048 --layers 22 --batch 4 --tokens 1024

Target: at most 2 % of a step over backward + clip_grad_norm_ + step. On a CUDA device the guard must also run
under `torch.cuda.set_sync_debug_mode("error")` from the second step on: no host read drains the queue.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from common import Row, alternate, cpu_name, header, median, ratio, spread, table, write_json

TARGET = 1.02


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()

    import torch

    if args.device == "cpu":
        torch.set_num_threads(1)
    name = cpu_name() if args.device == "cpu" else torch.cuda.get_device_name()
    facts = header("The guard against clip_grad_norm_", name, "torch", "transformers", "hfpatch")
    facts["rows"] = measure(args)
    if args.device != "cpu":
        facts["host reads"] = host_reads(args)
        print(f"\nsteps under sync debug mode 'error': {facts['host reads']}")
    write_json(args.json, facts)


def build(args: Any) -> tuple[Any, Any, Any]:
    """Model, fused optimizer and batch."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=args.hidden, intermediate_size=2 * args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(args.device, getattr(torch, args.dtype))
    ids = torch.randint(0, 1024, (args.batch, args.tokens), device=args.device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), ids


def measure(args: Any) -> list[Row]:
    """One step each way, in turn; only what comes after the forward is timed, the whole step beside it."""
    import torch

    from hfpatch.guarding.guard import Guard

    def wait() -> None:
        if args.device != "cpu":
            torch.cuda.synchronize()

    whole: dict[str, list[float]] = {}

    def timed(name: str, model: Any, ids: Any, after: Callable[[Any], None]) -> float:
        wait()
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        wait()
        between = time.perf_counter()
        after(loss)
        wait()
        end = time.perf_counter()
        whole.setdefault(name, []).append((end - start) * 1e3)
        return (end - between) * 1e3

    def plain(clip: bool) -> Callable[[], float]:
        model, optimizer, ids = build(args)

        def after(loss: Any) -> None:
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return lambda: timed("clip_grad_norm_" if clip else "no clipping", model, ids, after)

    def guarded(name: str, **kwargs: Any) -> Callable[[], float]:
        model, optimizer, ids = build(args)
        guard = Guard(model, optimizer, **kwargs)
        return lambda: timed(name, model, ids, guard.step)

    variants = {
        "clip_grad_norm_": plain(clip=True),
        "no clipping": plain(clip=False),
        "guard": guarded("guard"),
        "guard, weights not looked at": guarded("guard, weights not looked at", check_parameters=0),
        "guard, decision on the device": guarded("guard, decision on the device", on_device=True),
    }
    alternate(3, variants)
    whole.clear()
    alternate(args.rounds, variants)
    base = whole["clip_grad_norm_"]
    rows = [
        {
            "variant": name,
            "step ms": median(values),
            "against clip_grad_norm_": ratio(values, base),
            "quartiles": spread(values, base),
            "within target": ratio(values, base) <= TARGET if name.startswith("guard") else None,
        }
        for name, values in whole.items()
    ]
    table("A training step", rows, f"target: {TARGET} of a step with clip_grad_norm_")
    return rows


def host_reads(args: Any) -> str:
    """Guarded steps on a CUDA device with host reads forbidden."""
    import torch

    from hfpatch.guarding.guard import Guard

    model, optimizer, ids = build(args)
    guard = Guard(model, optimizer)
    for _ in range(3):
        guard.step(model(input_ids=ids, labels=ids).loss)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            loss = model(input_ids=ids, labels=ids).loss
            guard.step(loss)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "10 of 10 without a host read"


if __name__ == "__main__":
    main()
