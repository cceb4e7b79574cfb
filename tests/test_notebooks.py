"""Every notebook runs from top to bottom, shows what it says, and is kept with the outputs of such a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests import notebooks

FILES = {file.stem: file for file in sorted(notebooks.FOLDER.glob("*.ipynb"))}
REAL = "03_gemma_in_float16"
"""Kept with the outputs of real weights: tests/real/test_notebook.py runs it with them."""

SHOWS = {
    "01_inspect_and_apply": ["finite logits: 0 of 1536", "before 0.0001", "after  1e-06", "opt-in"],
    "02_trace": [
        "residual add in model.layers.1",
        "hfpatch.apply(model, only=[&#x27;fp16-residual-overflow&#x27;])",
        "It starts at output of model.layers.1.",
        "first bad: None",
        "under the loss scale 1,048,576; without the scale it fits",
        "[(0, 0), (2, 0)]",
        "<iframe",
    ],
    "03_gemma_in_float16": [
        "residual add in model.layers.",
        "finite logits: 0%",
        "it reaches ",
        "no patch of hfpatch is applied",
    ],
    "04_bolt_an_encoder_on": [
        "loss as built: nan",
        "eps of the new norm: 1e-06",
        "fell: True",
        "speech_proj was trained since projection-init and keeps its values",
    ],
    "05_find_the_nan_before_it_is_one": [
        "fp16-residual-overflow serves this stack",
        "steps-lost",
        "all finite: True",
        "in stages.1.scale: backward grows",
        "first bad: None",
        "<iframe",
    ],
    "06_a_guarded_lora_run": [
        "step 20: no-labels; weights unchanged: True",
        "step 22: loss; weights unchanged: True",
        "step 24: spike; weights unchanged: True",
        "loss fell: True",
        "every label is ignored",
        "shows a loss of 0.0 and the guard one of nan",
        "weights finite: True",
    ],
    "07_write_your_own_patch": [
        "3 of 3 cases passed",
        "edits of a bare apply: 0",
        "beyond the cap: False",
        "beyond the cap again: True",
        "exit code 0",
        "acme_patches.gemma2.logit_cap",
    ],
}


def test_each_has_its_words() -> None:
    assert SHOWS.keys() == FILES.keys()


@pytest.mark.parametrize("name", FILES)
def test_runs_and_is_kept_as_it_runs(name: str) -> None:
    kept = nbformat.read(FILES[name], as_version=4)
    found = notebooks.run(FILES[name], GEMMA="/no/such/folder")
    text = "".join(map(notebooks.shown, found.cells))
    assert not [words for words in SHOWS[name] if words not in text]
    assert text.count("<div><p><b>") >= 2, "results are shown as HTML"
    if name == REAL:
        assert "GEMMA /no/such/folder cannot be read here" in text
        assert "tiny random weights" in text
    else:
        same_words(kept, found)


def same_words(kept: Any, found: Any) -> None:
    """Cell by cell, all but figures is as it is kept."""
    for number, (a, b) in enumerate(zip(kept.cells, found.cells, strict=True)):
        assert notebooks.words(a) == notebooks.words(b), f"cell {number}: python -m tests.notebooks writes it"


@pytest.mark.parametrize("name", FILES)
def test_what_is_kept(name: str) -> None:
    kept = nbformat.read(FILES[name], as_version=4)
    text = "".join(map(notebooks.shown, kept.cells))
    assert not [words for words in SHOWS[name] if words not in text]
    assert not notebooks.PRIVATE.search(text)
    assert Path(FILES[name]).stat().st_size < 300 * 1024
    outputs = [output for cell in kept.cells for output in cell.get("outputs", ())]
    assert "error" not in {o["output_type"] for o in outputs}
    assert "stderr" not in {o.get("name") for o in outputs}, "a red box"
    assert not [o for o in outputs if not "".join([o.get("text", ""), *map(str, o.get("data", {}).values())]).strip()]
