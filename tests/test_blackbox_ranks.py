"""The black box over several processes: no replay waits for another rank, and the rank at fault writes the finding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hfpatch.blackbox import Bundle, read_bundle
from tests.ranks import launch


def ran(mode: str, folder: Path) -> tuple[list[dict[str, Any]], dict[int, list[Bundle]]]:
    found = launch(mode, 2, folder, "blackbox_worker")
    assert all(f["kinds"] == ["stepped", "skipped", "skipped", "stepped"] for f in found)
    assert found[0]["digest"] == found[1]["digest"]
    by_rank: dict[int, list[Bundle]] = {0: [], 1: []}
    for path in sorted((folder / "box").iterdir()):
        bundle = read_bundle(path)
        by_rank[bundle.about["rank"]].append(bundle)
    return found, by_rank


def test_a_bad_loss_under_ddp(tmp_path: Path) -> None:
    found, bundles = ran("ddp-loss", tmp_path)
    assert len(bundles[0]) == len(bundles[1]) == 5
    for bundle in bundles[1]:
        assert bundle.finding is not None
        assert bundle.finding["symptom"] == "bad-input"
        assert bundle.about["replay"]["exact"]
    assert all("every loss of rank 0 is finite; another rank's is not" in b.says for b in bundles[0])
    assert found[1]["stop"][-1] == f"next: hfpatch replay {bundles[1][-1].path} --model DIR"
    told = found[0]["stop"][-1]
    assert "hfpatch replay" not in told, "rank 0 has nothing to replay"
    others = Path(told.rpartition(" ")[2])
    assert bundles[1][-1].path in others.parent.glob(others.name)


@pytest.mark.thorough
def test_a_bad_gradient_under_ddp(tmp_path: Path) -> None:
    """Every rank's reduced gradients are NaN; only the run again without a reducer tells whose batch it was."""
    _, bundles = ran("ddp-gradient", tmp_path)
    for bundle in bundles[1]:
        assert bundle.finding is not None
        assert (bundle.finding["phase"], bundle.finding["module"]) == ("backward", "1")
    assert all(b.finding is None for b in bundles[0])
    assert "on another rank" in bundles[0][0].says


@pytest.mark.thorough
def test_layers_that_talk_to_other_ranks_are_not_run_again(tmp_path: Path) -> None:
    _, bundles = ran("ddp-talks", tmp_path)
    assert bundles[1]
    assert all("a layer communicates with other ranks" in b.says for b in bundles[1])


@pytest.mark.thorough
def test_sharded_parameters_are_not_run_again(tmp_path: Path) -> None:
    _, bundles = ran("fsdp-loss", tmp_path)
    assert all("sharded over ranks: running it again would wait for the others" in b.says for b in bundles[1])
    assert bundles[1][0].tensors["args.0"].isnan().any(), "the batch is kept all the same"
    assert bundles[1][0].about["model"]["fingerprint"] is None
