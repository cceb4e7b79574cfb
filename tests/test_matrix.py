"""Kinds of edit in wrappers: what docs/state.md says is what happens."""

from __future__ import annotations

import pytest

from hfpatch.patching import registry
from tests.matrix import ALL, documented, patch_row, run


@pytest.mark.parametrize("place", ALL[::9], ids=" - ".join)
def test_a_cell_is_as_documented(place: tuple[str, str, str]) -> None:
    assert run(*place).outcome == documented()[place] != "FAILS"


@pytest.mark.thorough
@pytest.mark.parametrize("place", ALL, ids=" - ".join)
def test_every_cell_is_as_documented(place: tuple[str, str, str]) -> None:
    assert run(*place).outcome == documented()[place] != "FAILS"


@pytest.mark.parametrize("patch_id", sorted(registry.entries()))
def test_a_patch_is_applied_found_and_reverted(patch_id: str) -> None:
    assert patch_row(patch_id).outcome == ("not run" if patch_id.startswith("cudnn-") else "works")


def test_every_cell_is_documented() -> None:
    assert set(documented()) == set(ALL)
