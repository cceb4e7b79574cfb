"""Kinds of edit in wrappers: what docs/state.md says is what happens."""

from __future__ import annotations

import pytest

from tests.matrix import ALL, documented, run


@pytest.mark.parametrize("place", ALL[::6], ids=" - ".join)
def test_a_cell_is_as_documented(place: tuple[str, str, str]) -> None:
    assert run(*place).outcome == documented()[place] != "FAILS"


@pytest.mark.interrupts
@pytest.mark.parametrize("place", ALL, ids=" - ".join)
def test_every_cell_is_as_documented(place: tuple[str, str, str]) -> None:
    assert run(*place).outcome == documented()[place] != "FAILS"


def test_every_cell_is_documented() -> None:
    assert set(documented()) == set(ALL)
