"""Each order of `lifecycle.ROWS` works, with right figures, or refuses, with nothing changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hfpatch.errors import HfpatchError
from tests import lifecycle
from tests.fingerprint import fingerprint


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("row", lifecycle.ROWS, ids=lambda r: r.name)
def test_order(row: lifecycle.Row, gemma: Any, ids: torch.Tensor) -> None:
    with torch.no_grad():
        exact = copy.deepcopy(gemma).float()(input_ids=ids).logits
        assert not gemma(input_ids=ids).logits.isfinite().all()
    if row.outcome == lifecycle.WORKS:
        got = row.run(gemma, ids)
        assert got.isfinite().all()
        assert ((got - exact).norm() / exact.norm()).item() < row.tolerance
        return
    with pytest.raises(HfpatchError, match=row.outcome.replace("(", r"\(").replace(")", r"\)")):
        row.run(gemma, ids)


def test_a_refusal_changes_nothing(gemma: Any, ids: torch.Tensor) -> None:
    wrapped = torch.compile(gemma, backend="eager")
    lifecycle.logits(wrapped, ids)
    before = fingerprint(gemma)
    with pytest.raises(HfpatchError):
        lifecycle.apply(wrapped)
    assert fingerprint(gemma) == before


def test_the_table_in_the_docs_is_this_one() -> None:
    assert lifecycle.FILE.read_text() == lifecycle.table()
