"""Torch's tensor parallelism before and after a patch: the linear maps hold parts of their weights, on one rank.

That ranks agree is tried with transformers' own plan (docs/distributed.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.cells import Outcome, through
from tests.interrupts import SUBJECTS
from tests.lifecycle import gloo
from tests.wrapped.liger import INSTEAD


def wrap(model: Any) -> Any:
    """With each linear map over the ranks by rows of its weight, but for a head, whose weight is the embedding's."""
    gloo()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    maps = [n for n, m in model.named_modules() if type(m) is nn.Linear and not n.endswith("lm_head")]
    return parallelize_module(model, mesh, {name: ColwiseParallel(output_layouts=Replicate()) for name in maps})


def row(kind: str, order: str) -> Outcome:
    """The cell of a kind of edit; GPT-2's maps are no linear layers, so other architectures stand in its place."""
    return through(INSTEAD.get(kind, SUBJECTS[kind]), wrap, order)
