"""Over several processes rank 0 proves and the others take its answer; nobody waits for a rank that does not plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import launch

PROVED = "applied: the residual stream is float16: it cannot hold more than 65,504; proved here, on a tiny gpt_neox"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("planning", "running"),
    [
        ("01", [True, False]),  # rank 0 proves for both
        ("0", [True, False]),  # nobody waits
        ("1", [False, True]),  # rank 1 waits for an answer, and then proves by itself
    ],
)
def test_who_proves(planning: str, running: list[bool], tmp_path: Path) -> None:
    told = launch(planning, 2, tmp_path, "proofs_worker")
    assert [bool(rank["ran"]) for rank in told] == running
    for rank, said in enumerate(told):
        assert len(said["told"]) == (str(rank) in planning)
        assert all(reason.startswith(PROVED) for reason in said["told"])
