"""The tracer in several processes: each rank finds its own, none waits for another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import launch


def test_ddp(tmp_path: Path) -> None:
    """The forward pass of one rank overflows; the others meet what it sent them in their gradients."""
    first, last = launch("ddp", 2, tmp_path, "trace_worker")
    assert first["steps"] == last["steps"] == [0, 1, 2]
    found = last["found"]
    assert (found["step"], found["phase"], found["operation"]) == (1, "forward", "power")
    assert found["module"] == "module.layers.0.1"
    assert first["found"]["phase"] == "gradients"
    assert first["found"]["step"] == 1


def test_sharded(tmp_path: Path) -> None:
    """A block with sharded parameters is not run again by one rank alone: the module is named, and why no more."""
    first, last = launch("fsdp", 2, tmp_path, "trace_worker")
    assert first["steps"] == last["steps"] == [0, 1, 2]
    found = last["found"]
    assert (found["step"], found["phase"]) == (1, "forward")
    assert found["tensor"] == "output of layers.0.1"


@pytest.mark.need(
    "on chosen epochs, their first batch, rank 0, off by itself",
    "one call",
    "`hfpatch.trace(model, epochs=[0, 8], steps=[0], ranks=[0])`",
)
@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["ddp-last"])
def test_on_one_rank_only(mode: str, tmp_path: Path) -> None:
    first, last = launch(mode, 2, tmp_path, "trace_worker")
    assert first == {"found": None, "steps": []}
    assert last["found"]["operation"] == "power"


@pytest.mark.thorough
def test_advice_is_tried_by_one_rank_alone(tmp_path: Path) -> None:
    """The model inside DDP is run again, so the rank that traces waits for no other."""
    _, last = launch("ddp-overflow-last", 2, tmp_path, "trace_worker")
    assert last["found"]["module"] == "module.llm.model.layers.1"
    assert last["advice"] == ["tried on this call: finite: hfpatch.apply(model, only=['fp16-residual-overflow'])"]
    assert last["patches"] == []


@pytest.mark.thorough
def test_advice_is_not_tried_on_shards(tmp_path: Path) -> None:
    for each in launch("fsdp-overflow", 2, tmp_path, "trace_worker"):
        assert not any(line.startswith("tried") for line in each["advice"])
