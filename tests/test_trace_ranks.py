"""The tracer in several processes: each rank finds its own, none waits for another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def launch(mode: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Run the worker on `ranks` processes; a deadlock ends in the timeout."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*torchrun, str(ROOT / "tests" / "trace_worker.py"), mode, str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def test_ddp(tmp_path: Path) -> None:
    """The forward pass of one rank overflows; the others meet what it sent them in their gradients."""
    first, last = launch("ddp", 2, tmp_path)
    assert first["steps"] == last["steps"] == [0, 1, 2]
    found = last["found"]
    assert (found["step"], found["phase"], found["operation"]) == (1, "forward", "power")
    assert found["module"] == "module.layers.0.1"
    assert first["found"]["phase"] == "gradients"
    assert first["found"]["step"] == 1


def test_sharded(tmp_path: Path) -> None:
    """A block with sharded parameters is not run again by one rank alone: the module is named, and why no more."""
    first, last = launch("fsdp", 2, tmp_path)
    assert first["steps"] == last["steps"] == [0, 1, 2]
    found = last["found"]
    assert (found["step"], found["phase"]) == (1, "forward")
    assert found["tensor"] == "output of layers.0.1"


@pytest.mark.parametrize("mode", ["ddp-last"])
def test_on_one_rank_only(mode: str, tmp_path: Path) -> None:
    first, last = launch(mode, 2, tmp_path)
    assert first == {"found": None, "steps": []}
    assert last["found"]["operation"] == "power"
