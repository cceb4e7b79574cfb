"""One rank of a guarded training with a black box; started by `launch` of ranks.py.

    torchrun --nproc-per-node N -m tests.blackbox_worker MODE FOLDER

The last rank alone meets a bad batch. Each rank writes FOLDER/rank.json with what it was told.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hfpatch.blackbox import BlackBox
from hfpatch.errors import GuardStop
from hfpatch.guarding.guard import Guard
from tests.guard_worker import digest, leave, wrap


class Talks(nn.Module):
    """A layer that talks to other ranks in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.detach().abs().max()
        dist.all_reduce(total)
        return x / total.clamp(min=1.0)


class Net(nn.Sequential):
    def forward(self, x: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return {"loss": super().forward(x).square().mean()}


class Root(nn.Module):
    """A gradient of NaN where the input is 0, under a loss that is finite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().sqrt()


def main(mode: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    torch.manual_seed(0)
    kind, _, fault = mode.partition("-")
    layers = {"talks": nn.Sequential(Talks(), Root()), "gradient": Root(), "loss": nn.Tanh()}
    first = nn.Linear(6, 9, bias=False)
    model: Any = wrap(kind, Net(first, layers[fault], nn.Linear(9, 3)))
    guard = Guard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), black_box=BlackBox(Path(folder, "box")), max_skips=3,
        verbose=False,
    )  # fmt: skip
    value = math.nan if fault == "loss" else 0.0
    found: dict[str, Any] = {"kinds": []}
    for step in range(4):
        x = torch.randn(4, 6)
        if step in (1, 2) and rank == last:
            x[1] = value
        found["kinds"].append(guard.step(model(x)["loss"]).facts.kind)
    found["digest"] = digest(model)
    try:
        for _ in range(9):
            guard.step(model(torch.full((4, 6), value if rank == last else 1.0))["loss"])
    except GuardStop as stop:
        found["stop"] = str(stop).splitlines()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
