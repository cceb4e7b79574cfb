"""`hfpatch.check(batch=)` beside training steps on the same batch: wall time, paired, and passes counted.

    OMP_NUM_THREADS=1 python benchmarks/check_cost.py

A Llama of random weights. A step is forward, backward and AdamW, as the arguments say it (checkpointing too); where
checkpointing cuts the layers off, it is the step without that fault (`use_reentrant=False`). The passes are those of
the outermost model; a backward pass counts as two forward passes. Target: at most 3.5 steps.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from common import Row, alternate, cpu_name, header, median, ratio, spread, table, write_json

TARGET = 3.5
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all weights": ("all", {}),
    "all weights, 4 accumulation steps": ("all", {"gradient_accumulation_steps": 4}),
    "all weights in bfloat16, 64 accumulation steps": ("bf16", {"gradient_accumulation_steps": 64}),
    "fresh LoRA": ("lora", {}),
    "fresh LoRA, reentrant checkpointing": ("lora", REENTRANT),
    "LoRA cut off by reentrant checkpointing, advice tried": ("cut", REENTRANT),
}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    facts = header("Cost of a check with a batch", cpu_name(), "torch", "transformers", "peft", "hfpatch")
    facts["rows"] = [measure(name, kind, given, args) for name, (kind, given) in CASES.items()]
    worst = max(row["check, in steps"] for row in facts["rows"])
    table(
        f"Median of {args.rounds} rounds, 2 x {args.tokens} tokens",
        facts["rows"],
        f"The dearest check: {worst:.2f} steps; target, at most {TARGET}: {'met' if worst <= TARGET else 'MISSED'}.",
    )
    write_json(args.json, facts)


def measure(name: str, kind: str, given: dict[str, Any], args: argparse.Namespace) -> Row:
    """One case."""
    import torch

    import hfpatch

    model, batch = built(kind, args.layers, args.tokens)
    if given.get("gradient_checkpointing"):
        model.gradient_checkpointing_enable(given["gradient_checkpointing_kwargs"])
    kwargs: dict[str, Any] = given.get("gradient_checkpointing_kwargs", {})
    if kind == "cut":
        model.disable_input_require_grads()
        given = {}  # it is on, and a Trainer that turned it on would make the inputs require gradients
        model.lm_head.weight.requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)

    def step() -> float:
        if kind == "cut":
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.disable_input_require_grads()
        start = time.perf_counter()
        model.train()(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    def check() -> float:
        if kind == "cut":
            model.gradient_checkpointing_enable(kwargs)
            model.disable_input_require_grads()
        start = time.perf_counter()
        hfpatch.check(model, given, optimizer=optimizer, batch=batch)
        return time.perf_counter() - start

    passes = counted(model, check)
    keep = {n: p.detach().clone() for n, p in model.named_parameters()}

    def fresh() -> float:
        took = step()
        with torch.no_grad():  # the adapter is fresh in every round
            for n, p in model.named_parameters():
                p.copy_(keep[n])
        return took

    fresh(), check()
    found = alternate(args.rounds, {"step": fresh, "check": check})
    return {
        "case": name,
        "parameters": f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M",
        "step, ms": median(found["step"]) * 1e3,
        "check, ms": median(found["check"]) * 1e3,
        "check, in steps": ratio(found["check"], found["step"]),
        "quartiles": spread(found["check"], found["step"]),
        "forwards": passes[0],
        "backwards": passes[1],
        "by passes, in steps": (passes[0] + 2 * passes[1]) / 3,
    }


def built(kind: str, layers: int, tokens: int) -> tuple[Any, dict[str, Any]]:
    """A Llama of one kind, and a batch."""
    import torch
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=384, intermediate_size=1024, num_hidden_layers=layers, num_attention_heads=6,
        num_key_value_heads=6, vocab_size=8192,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    if kind == "bf16":
        model.to(torch.bfloat16)
    if kind in ("lora", "cut"):
        inject_adapter_in_model(LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"]), model)
    ids = torch.randint(0, 8192, (2, tokens))
    return model, {"input_ids": ids, "labels": ids}


def counted(model: Any, check: Any) -> tuple[int, int]:
    """Forward and backward passes of the outermost model in one check."""
    import torch

    count = [0, 0]
    forward, grad, backward = model.forward, torch.autograd.grad, torch.Tensor.backward

    def run(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return forward(*args, **kwargs)

    def taken(*args: Any, **kwargs: Any) -> Any:
        count[1] += 1
        return grad(*args, **kwargs)

    def ran(*args: Any, **kwargs: Any) -> Any:
        count[1] += 1
        return backward(*args, **kwargs)

    model.forward, torch.autograd.grad, torch.Tensor.backward = run, taken, ran  # pyright: ignore
    try:
        check()
    finally:
        torch.autograd.grad, torch.Tensor.backward = grad, backward
        del model.forward
    return count[0], count[1]


if __name__ == "__main__":
    main()
