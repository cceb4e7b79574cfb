"""The whole loop on a model that is spread over two processes, each step held against one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.thorough
def test_each_way_to_spread_a_model(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    script = [str(ROOT / "benchmarks" / "ranks.py"), "--device", "cpu", "--small", "--tokens", "32", "--json", str(out)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert out.exists(), done.stderr[-4000:]
    found = json.loads(out.read_text())
    assert (found["WRONG"], done.returncode) == (0, 0), found["rows"]
    refused = {(row["way"], k) for row in found["rows"] for k, v in row.items() if v.startswith("refused")}
    sharded = ("apply, FSDP2", "FSDP2, apply", "tensor parallel, apply")
    assert refused == {(way, "verify") for way in sharded}
    assert found["right"] == 7 * 5 - len(refused)
