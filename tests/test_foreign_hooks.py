"""Hooks that a user's model brings from another process survive whatever hfpatch does to the model here.

torch numbers hooks from 0 in each process, so that a loaded model holds numbers that are handed out again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hfpatch.lab.tiny import tiny_model
from tests import foreign_hooks

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.thorough
def test_hooks_of_a_loaded_model_are_there_and_called_as_before(tmp_path: Path) -> None:
    model = tiny_model("llama")
    foreign_hooks.hook(model)
    torch.save(model, tmp_path / "model.pt")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    script = "import sys, pathlib; from tests import foreign_hooks; foreign_hooks.main(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == [f"{way} lost: [] called otherwise: []" for way in foreign_hooks.WAYS]


def test_hooks_of_tensors_are_in_no_saved_model(tmp_path: Path) -> None:
    """So their numbers cannot collide; hfpatch may leave them to torch."""
    layer = torch.nn.Linear(2, 2)
    layer.weight.register_hook(foreign_hooks.Counts())
    torch.save(layer, tmp_path / "layer.pt")
    loaded = torch.load(tmp_path / "layer.pt", weights_only=False)
    assert layer.weight._backward_hooks
    assert not loaded.weight._backward_hooks
