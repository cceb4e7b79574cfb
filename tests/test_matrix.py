"""Kinds of edit in wrappers: what docs/state.md says is what happens."""

from __future__ import annotations

import re
from functools import partial

import pytest

from hfpatch.patching import registry
from hfpatch.patching.verifying.proving import repros
from tests.cells import through
from tests.interrupts import Subject
from tests.matrix import ALL, FILE, WRAPPERS, documented, patch_row, row_of, run
from tests.sampling import slow, some_quick
from tests.test_registry import CARD
from tests.wrapped import ROWS, WITH_PACKAGES, liger

OWN_WAY = [name for name in ROWS if name not in WITH_PACKAGES]
STARTS_SLOWLY = ("torch.export", "spawn")
SAMPLE = [
    *some_quick([place for place in ALL if place[1] in WRAPPERS][::9], every=3),
    *(pytest.param(("hook", name, "after")) for name in OWN_WAY if name not in STARTS_SLOWLY),
    *(slow((kind, name, "after")) for kind in ("tensor", "buffer") for name in OWN_WAY),
]


@pytest.mark.parametrize("place", SAMPLE, ids=" - ".join)
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


@pytest.mark.thorough
@pytest.mark.parametrize(("architecture", "mlp"), [("llama", "swiglu"), ("gemma3_text", "geglu")])
def test_liger_without_its_mlp_leaves_scaled_branches(architecture: str, mlp: str) -> None:
    subject = Subject(liger.half(architecture), "fp16-branch-overflow")
    subject.make()  # its code is imported now, so that what Liger sets in it can be put back
    with liger.kernels():
        assert through(subject, partial(liger.wrap, **{mlp: False}), "after", rounding=5e-3) == ("works", "")


def test_every_cell_is_documented() -> None:
    assert set(documented()) == set(ALL)
