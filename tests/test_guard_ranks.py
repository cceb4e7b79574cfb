"""The guard over several processes: one decision, no deadlock, norms as of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests import guard_worker as worker
from tests.ranks import launch


def reference(ranks: int) -> tuple[list[float], list[list[float]]]:
    """One process: the mean of the ranks' losses, good steps only; norms in float64."""
    model = worker.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    taken = 0
    for step in range(worker.STEPS):
        losses = [worker.loss_of(model, step, r, ranks) for r in range(ranks)]
        if step == worker.EMPTY_AT:
            losses = [x for x in losses if not x.isnan()]
        (sum(losses) / ranks).backward()  # type: ignore[union-attr]
        norms.append(torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm().item())
        if step in (0, worker.EMPTY_AT, worker.STEPS - 1):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = 1e-2 * 0.5**taken
            optimizer.step()
            taken += 1
        optimizer.zero_grad()
    return norms, [p.detach().flatten().tolist() for p in model.parameters()]


@pytest.mark.parametrize(
    ("mode", "ranks"),
    [
        ("ddp", 2), ("ddp-fused", 2), ("fsdp", 2), ("fsdp-fused", 2), ("accelerate", 2),
        *(pytest.param(mode, 4, marks=pytest.mark.thorough) for mode in ("ddp", "fsdp", "hsdp")),
    ],
)  # fmt: skip
def test_all_ranks_decide_alike_and_as_one_process_would(mode: str, ranks: int, tmp_path: Path) -> None:
    found = launch(mode, ranks, tmp_path)
    for key in ("said", "digests", "schedule", "stop"):
        assert all(f[key] == found[0][key] for f in found), key
    kinds = [text.rsplit(" (", 1)[0] for text in found[0]["said"]]
    assert kinds[0] == kinds[4] == kinds[5] == "stepped None"
    assert kinds[1] == "skipped non-finite loss"
    assert kinds[2] == "skipped non-finite gradients"
    assert kinds[3].startswith("skipped gradient norm over the limit")
    assert "largest gradients: " in found[0]["said"][3]
    assert "nearest the loss: 2.bias, 2.weight, 0.bias" in found[0]["said"][2]
    assert found[0]["schedule"] == 3
    digests = found[0]["digests"]
    assert digests[0] == digests[1] == digests[2] == digests[3] != digests[4] != digests[5]
    assert "4 steps in a row were skipped (7 to 10): 4 x non-finite loss" in found[0]["stop"]
    norms, weights = reference(ranks)
    for step in (0, 3, 4, 5):
        assert found[0]["norms"][step] == pytest.approx(norms[step], rel=1e-5)
    for got, want in zip(found[0]["weights"], weights, strict=True):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-4, atol=1e-6)
