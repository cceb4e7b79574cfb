"""On a newer transformers a patch holds, by a fresh proof, or is refused with the reason: never NaN, never a traceback.

A newer one is the installed one with other code (`tests/newer.py`): each drift in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.newer import DRIFTS, FILES, Came

STREAM, BRANCH = "fp16-residual-overflow", "fp16-branch-overflow"
LOGITS, TOWER, BUFFERS = "fp32-attention-logits", "tower-input-grads", "fp32-buffers"
REFUSED = {
    "the stream gets the dtype of the branch": {STREAM, BRANCH},
    "a norm computes in the dtype of its weight": {STREAM, BRANCH},
    "the stream is a keyword of another name": {TOWER},
    "the stream is a keyword of its own name": {TOWER},
    "the stream comes in a tuple": {STREAM, BRANCH, TOWER},
    "the attention interface gets no scaling": {LOGITS},
    "the attention interface returns a tensor alone": {LOGITS},
    "the attention interface gets the mask by another name": {LOGITS},
    "a layer returns an output with names": {BRANCH, TOWER},
    "the rotary table has another name": {BUFFERS},
}
"""The patches that cannot hold after a drift, on some architecture."""


def ran(drift: str, folder: Path) -> list[Came]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.newer", drift, str(folder)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [Came(**each) for each in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.thorough
@pytest.mark.parametrize("drift", DRIFTS)
def test_it_holds_or_is_refused(drift: str, tmp_path: Path) -> None:
    came = ran(drift, tmp_path)
    assert len({each.case.split()[0] for each in came}) >= min(3, len(FILES))
    for each in came:
        assert not each.raised, each
        if each.edits:
            assert each.after is None, each
            assert each.healthy is None or each.healthy[0] <= each.most, each
        elif each.decided:
            assert all(each.reasons), each
            assert each.before is None or "not needed" not in each.decided, each
    held = {each.patch for each in came if each.edits}
    assert len(held) > 6
    refused = {each.patch for each in came if "refused" in each.decided and each.before}
    assert refused == REFUSED.get(drift, set())
