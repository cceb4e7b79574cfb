"""A language model's head in float32: error of log-probabilities, step time and memory, stock and patched.

    OMP_NUM_THREADS=1 python benchmarks/lm_head.py [--checkpoint DIR --tokens-file FILE] [--device cuda] [--json FILE]

Part a, a head alone (bfloat16, random; the first has the shape of Gemma 3 270M's): the largest error of a token's loss
against float64, seconds of a forward and a backward pass, and the largest allocation. Part b, with a checkpoint, which
is loaded in bfloat16: the ratio of a token's probabilities in a step of generation (with a cache) and in one forward
pass over the same tokens; 1 is wanted. The layers below the head round as before, so b shows what is left.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import Row, alternate, cpu_name, header, median, ratio, table, write_json
from torch import nn
from torch.nn import functional

import hfpatch
from hfpatch.numerics.linear_in_parts import linear_in_float32

ROUNDS = 3
SHAPES = ((262_144, 640, 64), (32_768, 640, 1024))
"""Vocabulary, width, tokens."""


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--checkpoint")
    parser.add_argument("--tokens-file", help="JSON that benchmarks/token_file.py makes")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()
    where = torch.cuda.get_device_name() if args.device == "cuda" else cpu_name()
    facts = header("The head in float32", where, "torch", "transformers", "hfpatch")
    facts["a"] = []
    for vocabulary, width, tokens in SHAPES:
        rows = head(vocabulary, width, tokens, args.device)
        facts["a"] += [{"vocabulary": vocabulary, "width": width, "tokens": tokens, **row} for row in rows]
        note = "seconds: a forward and a backward pass with the loss; ratio: paired with stock"
        table(f"a. {vocabulary:,} x {width}, {tokens:,} tokens, bfloat16", rows, note)
    if args.checkpoint:
        facts["b"] = ratios(args)
        table("b. probability of a token, generation / forward", facts["b"])
    write_json(args.json, facts)


def head(vocabulary: int, width: int, tokens: int, device: str) -> list[Row]:
    """The head alone, in three ways."""
    torch.manual_seed(0)
    x = torch.randn(tokens, width).to(device, torch.bfloat16).requires_grad_()
    w = (torch.randn(vocabulary, width) / width**0.5 * 4).to(device, torch.bfloat16)
    labels = torch.randint(0, vocabulary, (tokens,), device=device)
    exact = losses(x.detach().double() @ w.double().T, labels)
    ways: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "stock": functional.linear,
        "float32, whole weight": lambda x, w: functional.linear(x.float(), w.float()),
        "float32, in parts (fp32-lm-head)": linear_in_float32,
    }
    w.requires_grad_()
    found = {
        name: float((losses(way(x, w).float(), labels).detach().double() - exact).abs().max())
        for name, way in ways.items()
    }
    peaks = {name: peak(way, x, w, labels) for name, way in ways.items()}
    times = alternate(ROUNDS, {name: lambda way=way: seconds(way, x, w, labels) for name, way in ways.items()})
    return [
        {
            "head": name,
            "largest error of a token's loss": found[name],
            "seconds": median(times[name]),
            "ratio": ratio(times[name], times["stock"]),
            "peak, MiB": peaks[name],
        }
        for name in ways
    ]


def losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of each token."""
    return functional.cross_entropy(logits, labels, reduction="none")


def step(way: Any, x: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> None:
    """A forward and a backward pass, with the loss that transformers computes."""
    losses(way(x, w).float(), labels).mean().backward()
    x.grad = w.grad = None


def seconds(way: Any, x: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> float:
    """Time of a step."""
    start = time.perf_counter()
    step(way, x, w, labels)
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak(way: Any, x: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> float:
    """Largest memory that a step allocates beside its inputs, in MiB."""
    if x.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(way, x, w, labels)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(way, x, w, labels)
    held = most = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most / 2**20


def ratios(args: argparse.Namespace) -> list[Row]:
    """A real model: the probabilities of the tokens of a text, one by one with a cache, and all at once."""
    from transformers import AutoModelForCausalLM

    ids = torch.tensor(json.loads(Path(args.tokens_file).read_text())[0][:96], device=args.device)[None]
    rows: list[Row] = []
    for name in ("stock", "fp32-lm-head"):
        model: Any = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.bfloat16).to(args.device).eval()
        if name != "stock":
            hfpatch.apply(model, only=name, verbose=False)
        away = (one_by_one(model, ids) - at_once(model, ids)).exp()
        rows.append(
            {
                "head": name,
                "largest ratio": float(away.max()),
                "smallest ratio": float(away.min()),
                "mean |log ratio|": float(away.log().abs().mean()),
            }
        )
    return rows


def at_once(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the tokens after the first, from one forward pass."""
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1].double()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0]


def one_by_one(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The same with a cache, as generation computes them."""
    cache, found = None, []
    with torch.no_grad():
        for at in range(ids.shape[1] - 1):
            out = model(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits[0, -1].double().log_softmax(-1)[ids[0, at + 1]])
    return torch.stack(found)


if __name__ == "__main__":
    main()
