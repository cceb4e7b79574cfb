"""The notebook on Gemma 3 in float16, with its real weights, shows what it is kept with."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tests import notebooks
from tests.test_notebooks import FILES, REAL, same_words

pytestmark = pytest.mark.real


@pytest.mark.need(
    "(not found by hand) the residual stream passes 65,504",
    "one call",
    "`hfpatch.apply(model)` (`fp16-residual-overflow`)",
)
def test_gemma_in_float16(gemma_dir: Path) -> None:
    found = notebooks.run(FILES[REAL], GEMMA=str(gemma_dir))
    text = "".join(map(notebooks.shown, found.cells))
    assert "real weights 74 tokens" in text
    assert "residual add in model.layers.7" in text
    assert "the patched model is closer: True" in text
    same_words(nbformat.read(FILES[REAL], as_version=4), found)
