"""What `sigmoid-modulation` costs after apply: a patched model beside one whose source has the bounded factor.

    OMP_NUM_THREADS=1 python benchmarks/modulation.py           # --device cuda on a card

Both compute the same bits. Target: patched / hand-written at most 1.01, forward and training step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from common import Row, alternate, cpu_name, header, median, ratio, spread, table, write_json

TARGET = 1.01


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="also compiled with inductor")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    device = cpu_name() if args.device == "cpu" else torch.cuda.get_device_name()
    facts = header("Sigmoid modulation after apply", device, "torch", "transformers", "hfpatch")
    facts["rows"] = measure(args)
    write_json(args.json, facts)


def measure(args: Any) -> list[Row]:
    """Forward and training step of SmolLM2's shape (random weights), and the modulation module alone."""
    import torch

    models = {name: llama(name, args.device) for name in ("hand-written", "patched", "stock 1 + tanh")}
    ids = torch.arange(args.tokens, device=args.device)[None] % 1000
    with torch.no_grad():
        same = torch.equal(models["patched"](input_ids=ids).logits, models["hand-written"](input_ids=ids).logits)
    works: dict[str, dict[str, Callable[[], Any]]] = {
        "forward": {n: lambda m=m: forward(m, ids) for n, m in models.items()},
        "training step": {n: lambda m=m: step(m, ids) for n, m in models.items()},
    }
    if args.compile:
        compiled = {n: torch.compile(m) for n, m in models.items()}
        works["forward, compiled"] = {n: lambda m=m: forward(m, ids) for n, m in compiled.items()}
    h = torch.randn(1, args.tokens, 576, device=args.device)
    works["one modulation alone"] = {
        n: lambda m=m: [call(m.model.layers[0].modulation, h) for _ in range(50)] for n, m in models.items()
    }
    rows: list[Row] = []
    for work, variants in works.items():
        timed = {n: timer(run, args.device) for n, run in variants.items()}
        for run in timed.values():
            run()
            run()
        found = alternate(args.rounds, timed)
        base = found["hand-written"]
        for name, times in found.items():
            scale = 1e3 / 50 if work == "one modulation alone" else 1e3
            rows.append(
                {
                    "work": work,
                    "model": name,
                    "ms": median(times) * scale,
                    "ratio to hand-written": ratio(times, base),
                    "quartiles": spread(times, base),
                    "within target": ratio(times, base) <= TARGET if name == "patched" else None,
                }
            )
    table("Time", rows, f"Logits of patched and hand-written are the same bits: {'yes' if same else 'no'}.")
    return rows


def llama(kind: str, device: str) -> Any:
    """SmolLM2's shape with a trained modulation in each of 30 layers."""
    import torch
    from torch import nn
    from transformers import LlamaConfig, LlamaForCausalLM

    import hfpatch
    from hfpatch.numerics.modulation import delta

    class Stock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a_proj = nn.Linear(576, 16, bias=False)
            self.b_mult = nn.Linear(16, 576, bias=False)

        def forward(self, h: Any) -> Any:
            return h * (1 + torch.tanh(self.b_mult(self.a_proj(h))))

    class Hand(Stock):
        def forward(self, h: Any) -> Any:
            return h * (1 + delta(self.b_mult(self.a_proj(h))))

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).requires_grad_(requires_grad=False)
    for layer in model.model.layers:
        layer.modulation = Hand() if kind == "hand-written" else Stock()
        layer.register_forward_hook(lambda layer, _args, out: layer.modulation(out))
    model.to(device)
    if kind == "patched":
        fix = hfpatch.apply(model, only="sigmoid-modulation", verbose=False)
        assert len(fix.edits) == 30
    return model


def forward(model: Any, ids: Any) -> None:
    """One forward without gradients."""
    import torch

    with torch.no_grad():
        model(input_ids=ids, use_cache=False)


def step(model: Any, ids: Any) -> None:
    """Forward and backward."""
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()


def call(module: Any, h: Any) -> None:
    """The module alone, without gradients."""
    import torch

    with torch.no_grad():
        module(h)


def timer(run: Callable[[], Any], device: str) -> Callable[[], float]:
    """Seconds of one run."""
    import torch

    def timed() -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return timed


if __name__ == "__main__":
    main()
