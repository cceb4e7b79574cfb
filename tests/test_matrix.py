"""Kinds of edit in wrappers: what docs/state.md says is what happens."""

from __future__ import annotations

import re

import pytest

from hfpatch.patching import registry
from hfpatch.patching.verifying.proving import repros
from tests.matrix import ALL, FILE, documented, patch_row, row_of, run
from tests.sampling import some_quick
from tests.test_registry import CARD


@pytest.mark.parametrize("place", some_quick(ALL[::9], every=3), ids=" - ".join)
def test_a_cell_is_as_documented(place: tuple[str, str, str]) -> None:
    assert run(*place).outcome == documented()[place] != "FAILS"


@pytest.mark.thorough
@pytest.mark.parametrize("place", ALL, ids=" - ".join)
def test_every_cell_is_as_documented(place: tuple[str, str, str]) -> None:
    assert run(*place).outcome == documented()[place] != "FAILS"


@pytest.mark.parametrize("patch_id", sorted(registry.entries()))
def test_a_patch_is_applied_found_and_reverted(patch_id: str) -> None:
    row = patch_row(patch_id)
    assert row.outcome == ("not run" if all(c.device == "cuda" for c in repros(registry.get(patch_id))) else "works")
    page = FILE.read_text()
    assert f"| `{patch_id}` |" not in page.partition("## Patches")[2] or row_of(row) in page


def test_the_page_has_a_row_for_at_least_these_patches() -> None:
    rows = FILE.read_text().partition("## Patches")[2].partition("\n## ")[0]
    assert CARD <= set(re.findall(r"^\| `([a-z0-9-]+)` \|", rows, flags=re.MULTILINE)) <= set(registry.entries())


def test_every_cell_is_documented() -> None:
    assert set(documented()) == set(ALL)
