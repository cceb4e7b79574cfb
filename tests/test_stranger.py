"""benchmarks/stranger_model.py: what hfpatch says of a model of one's own is so, here without a new environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT


def test_each_sentence_is_true(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "stranger_model.py")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    steps = ["the model is built", "the first sentence about it", "apply", "verify", "the checkpoint", "revert"]
    assert [line["step"] for line in told] == steps
    assert all(line["true"] for line in told), told
    assert "fp16-residual-overflow" in told[2]["said"]
