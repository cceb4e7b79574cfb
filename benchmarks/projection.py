"""What a re-drawn projector costs, what planning its re-draw costs, and how its outputs compare with the text's.

    OMP_NUM_THREADS=1 python benchmarks/projection.py

A forward after the patch is the same arithmetic on other numbers: target, time at most 1.01 of before.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from common import Row, alternate, cpu_name, header, median, ratio, spread, table, write_json

LIMIT = 1.01
ARCHITECTURES = ("llama", "gemma3_text", "qwen2", "gpt2")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=1280, help="features a frame")
    parser.add_argument("--hidden", type=int, default=2048, help="features of an embedding")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()

    import torch

    device = cpu_name() if args.device == "cpu" else torch.cuda.get_device_name(args.device)
    facts = header("Projector: cost and size of its outputs", device, "torch", "transformers", "hfpatch")
    facts["forward"] = forward(args.rounds, args.width, args.hidden, args.device)
    facts["proof"] = proof(args.hidden, args.device)
    facts["size"] = size()
    write_json(args.json, facts)


def forward(rounds: int, width: int, hidden: int, device: str) -> list[Row]:
    """The composite's norm and projector, forward and backward, stock and re-drawn in turn."""
    import torch

    import hfpatch
    from hfpatch.lab.tiny import SpeechLLM, tiny_model

    torch.manual_seed(0)
    stock, patched = (SpeechLLM(tiny_model("llama", hidden_size=hidden), width=width).to(device) for _ in range(2))
    hfpatch.apply(patched, only="projection-init", verbose=False)
    features = torch.randn(4, 32, width, device=device)

    def timed(model: Any) -> float:
        start = time.perf_counter()
        out = model.speech_proj(model.ln_speech(features))
        out.sum().backward()
        if device != "cpu":
            torch.cuda.synchronize()
        model.zero_grad()
        return (time.perf_counter() - start) * 1e3

    variants = {"stock": lambda: timed(stock), "stock again": lambda: timed(stock), "patched": lambda: timed(patched)}
    alternate(10, variants)
    found = alternate(rounds, variants)
    rows: list[Row] = [
        {
            "projector": name,
            "median ms": median(times),
            "time / stock": ratio(times, found["stock"]),
            "quartiles": spread(times, found["stock"]),
        }
        for name, times in found.items()
    ]
    cost = ratio(found["patched"], found["stock"])
    table(
        f"Forward and backward of norm and projector, {width} -> {hidden}, 4 x 32 frames, {rounds} rounds",
        rows,
        f"Patched / stock: {cost:.3f}; target at most {LIMIT}: {'met' if cost <= LIMIT else 'MISSED'}. "
        "The second stock row is the noise of the method.",
    )
    return rows


def proof(hidden: int, device: str) -> list[Row]:
    """How long the proof takes that a layer is untouched, and that a trained one is not."""
    import torch
    from torch import nn

    from hfpatch.model.projector.untouched import default_init

    rows: list[Row] = []
    for width in (384, 1280, 5 * 1280):
        layer = nn.Linear(width, hidden).to(device)
        for kind in ("untouched", "trained"):
            times: list[float] = []
            for _ in range(5):
                start = time.perf_counter()
                found = default_init(layer)
                times.append((time.perf_counter() - start) * 1e3)
            rows.append({"layer": f"{width} -> {hidden}", "values": kind, "proved": found, "median ms": median(times)})
            with torch.no_grad():
                layer.weight.mul_(1 - 1e-6)
    table("The proof that a layer is untouched", rows)
    return rows


def size() -> list[Row]:
    """RMS of projected noise over that of the token embeddings, before and after, on tiny models."""
    import torch

    import hfpatch
    from hfpatch.lab.tiny import SpeechLLM, tiny_model

    rows: list[Row] = []
    features = torch.randn(4096, 384, generator=torch.Generator().manual_seed(1))
    for name in ARCHITECTURES:
        torch.manual_seed(0)
        model = SpeechLLM(tiny_model(name), width=384)
        with torch.no_grad():
            text = hfpatch.embed_tokens(model)(torch.arange(64)).square().mean().sqrt().item()
            before = model.speech_proj(features).square().mean().sqrt().item()
            hfpatch.apply(model, only="projection-init", verbose=False)
            after = model.speech_proj(features).square().mean().sqrt().item()
        rows.append(
            {"model": f"tiny {name}", "embeddings": text, "before / text": before / text, "after / text": after / text}
        )
    table("RMS of the projector's outputs, fed noise of RMS 1", rows)
    return rows


if __name__ == "__main__":
    main()
