"""One rank that plans a model of which no shipped proof says anything; started by `launch` of ranks.py.

Each rank writes FOLDER/rank.json: how it decided, and whether it ran the repros itself. MODE names the ranks that plan.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from huggingface_hub import constants

import hfpatch
from hfpatch.lab.tiny import tiny_model
from hfpatch.patching.proofs import lookup, prove
from tests.guard_worker import leave

MODE, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK = int(os.environ["RANK"])

ran: list[str] = []
run = prove.prove


def noted(*given: Any) -> Any:
    ran.append(given[1])
    return run(*given)


def main() -> None:
    constants.HF_ASSETS_CACHE = str(FOLDER / f"assets-{RANK}")  # each rank keeps its own proofs
    prove.prove = noted
    lookup.WAIT = 60 if MODE == "01" else 3
    dist.init_process_group("gloo")
    told: list[str] = []
    if str(RANK) in MODE:
        model = tiny_model("gpt_neox", use_parallel_residual=False).half()
        told = [f"{d.decided}: {d.reason}" for d in hfpatch.plan(model, only="fp16-residual-overflow").decisions]
    (FOLDER / f"{RANK}.json").write_text(json.dumps({"ran": ran, "told": told}))
    leave()


main()
