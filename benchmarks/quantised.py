"""A tiny Llama whose branches pass 65,504, quantised by torchao (int8, weights only): what each patch does.

    python benchmarks/quantised.py --json FILE          (needs torchao, which hfpatch does not)

For each patch: its decision without and with a batch, and the error of the patched model from the quantised one in
float32, which computes the same function.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import warnings
from typing import Any

import torch
from common import Row, cpu_name, header, table, write_json

import hfpatch
from hfpatch.errors import RefusedError
from hfpatch.lab.branch_overflow import branch_overflow
from hfpatch.lab.tiny import tiny_model

BATCH = {"input_ids": (torch.arange(24).reshape(2, 12) * 7 + 3) % 64}
PATCHES = ("fp16-residual-overflow", "fp16-branch-overflow", "fp32-lm-head", "fp32-buffers")


def main() -> None:
    """Print a row for each patch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    facts = header("Quantised weights", cpu_name(), "torch", "torchao", "transformers", "hfpatch")
    master = tiny_model("llama")
    branch_overflow(master, BATCH)
    master = master.half().float()
    model, exact = quantised(copy.deepcopy(master).half()), quantised(master)(**BATCH).logits
    rows = [tried(model, patch, batch, exact) for patch in PATCHES for batch in (None, BATCH)]
    facts["rows"] = rows
    facts["stock finite"] = bool(model(**BATCH).logits.isfinite().all())
    table(
        "Patches on int8 weights", rows, f"Stock is finite: {facts['stock finite']}. One patch alone may not be enough."
    )
    write_json(args.json, facts)


def quantised(model: Any) -> Any:
    """The model with int8 weights in its linear layers, in place."""
    torchao: Any = importlib.import_module("torchao.quantization")
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    return model


def tried(model: Any, patch: str, batch: Any, exact: torch.Tensor) -> Row:
    """The decision on one patch, and the error with it."""
    here = copy.deepcopy(model)
    decision = next(d for d in hfpatch.plan(here, only=patch, batch=batch).decisions if d.patch == patch)
    row: Row = {"patch": patch, "batch": batch is not None, "decision": decision.decided, "error": None}
    try:
        hfpatch.apply(here, only=patch, batch=batch, verbose=False)
        got = here(**BATCH).logits.float()
        row["error"] = float((got - exact).norm() / exact.norm())
    except RefusedError:
        pass
    return {**row, "why": decision.reason}


if __name__ == "__main__":
    main()
