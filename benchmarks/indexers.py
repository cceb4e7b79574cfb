"""The positions that the sparse indexers of eleven architectures choose, stock and patched, beside float32.

    OMP_NUM_THREADS=1 python benchmarks/indexers.py

Each is a tiny random model on the CPU that has to choose a few of 64 positions. The float32 run gets the same inputs of
the indexer, with float32 copies of its weights. `product` is the dtype of queries times keys; `scores` the largest
difference relative to the largest score; `rows` the share of rows in which the same positions are chosen.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from common import Row, cpu_name, header, table, write_json
from hfpatch.patches.shared.fp32_indexer import CONFIGS

import hfpatch
from hfpatch.lab.tiny import tiny_model
from hfpatch.patching.verifying.chosen import Choice, choices
from hfpatch.patching.verifying.trial import inputs_of

SETTINGS = (
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("bfloat16", None),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
)
"""Dtype of the weights, and of autocast."""
SEEDS = 4
TOKENS = 64


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()
    facts = header("Sparse indexers under autocast", cpu_name(), "torch", "transformers", "hfpatch")
    facts["rows"] = []
    for weights, autocast in SETTINGS:
        rows = [row(name, weights, autocast) for name in CONFIGS]
        facts["rows"] += rows
        shown = [{k: v for k, v in r.items() if k not in ("weights", "autocast")} for r in rows]
        table(f"{weights} weights, {f'{autocast} autocast' if autocast else 'no autocast'}", shown)
    exact = [r for r in facts["rows"] if r["autocast"]]
    facts["equal after the patch"] = all(r["rows, patched"] == 1.0 for r in exact)
    print(f"\nunder autocast, patched: all rows as in float32: {'yes' if facts['equal after the patch'] else 'NO'}")
    print("without autocast the product is float32 already: the difference there is the rounding of the projections")
    write_json(args.json, facts)


def row(name: str, weights: str, autocast: str | None) -> Row:
    """One architecture in one setting, stock and patched."""
    stock, patched = [], []
    for seed in range(SEEDS):
        model = torch.nn.Module.to(tiny_model(name, seed=seed, **CONFIGS[name]), getattr(torch, weights))
        stock += run(model, autocast, seed)
        hfpatch.apply(model, only="fp32-indexer", verbose=False)
        patched += run(model, autocast, seed)
    return {
        "architecture": name,
        "weights": weights,
        "autocast": autocast,
        **summary(stock, "stock"),
        **summary(patched, "patched"),
    }


def run(model: Any, autocast: str | None, seed: int) -> list[Choice]:
    """What the indexers choose in one forward pass."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 64, (2, TOKENS), generator=generator)
    region = torch.autocast("cpu", dtype=getattr(torch, autocast)) if autocast else contextlib.nullcontext()
    with region:
        return choices(model, lambda: model(**inputs_of(model, ids)))


def summary(found: Sequence[Choice], name: str) -> Row:
    """The figures of several calls."""
    return {
        f"product, {name}": ", ".join(sorted({str(c.product) for c in found})),
        f"scores, {name}": max(c.error for c in found),
        f"rows, {name}": sum(c.equal for c in found) / sum(c.rows for c in found),
    }


if __name__ == "__main__":
    main()
