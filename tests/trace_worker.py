"""One rank of a traced training; started by `launch` of ranks.py.

    torchrun --nproc-per-node N -m tests.trace_worker MODE FOLDER

Each rank writes FOLDER/rank.json: what it found, and its gradients' sum. The last rank's second batch overflows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hfpatch
from hfpatch.lab.tiny import rescale, tiny_model
from tests.guard_worker import leave


class Square(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), Square()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


class Overflowing(nn.Module):
    """A Gemma 3 whose stream overflows float16."""

    def __init__(self) -> None:
        super().__init__()
        self.llm = tiny_model("gemma3_text")
        rescale(self.llm, {}, {"*post_feedforward_layernorm.weight": 24000.0})
        self.layers = self.llm.half().model.layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (torch.arange(24).reshape(2, 12) * 7 + 3) % 64
        return self.llm(input_ids=ids, labels=ids).loss + 0 * x.sum()


def wrap(mode: str, model: nn.Module) -> nn.Module:
    if mode.startswith("ddp"):
        return DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model)
    return model


def main(mode: str, folder: str) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model: Any = wrap(mode, Overflowing() if "overflow" in mode else Net())
    ranks = [world - 1] if mode.endswith("last") else None
    with hfpatch.trace(model, ranks=ranks) as t:
        for step in range(3):
            x = torch.ones(4, 6)
            if rank == world - 1 and step == 1:
                x *= 1e20
            model(x).backward()
            model.zero_grad()
    found = t.first_bad
    out: dict[str, Any] = {"found": found.to_dict() if found else None, "steps": [s.number for s in t.steps]}
    if "overflow" in mode:
        out |= {"advice": t.advice, "patches": hfpatch.status(model).patches}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(out))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
