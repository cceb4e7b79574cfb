"""Every notebook runs from top to bottom, and shows what it says it shows."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"


SHOWS = {
    "01_inspect_and_apply": ["finite logits: 0 of 1536", "before 0.0001", "after  1e-06", "opt-in"],
    "02_trace": [
        "residual add in model.layers.1",
        "hfpatch.apply(model, only=[&#x27;fp16-residual-overflow&#x27;])",
        "It starts at output of model.layers.1.",
        "first bad: None",
        "under the loss scale 1,048,576; without the scale it fits",
        "[(0, 0), (2, 0)]",
    ],
}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.ipynb")), ids=lambda p: p.stem)
def test_runs(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    assert all(not c.get("outputs") for c in notebook.cells), "notebooks are kept without outputs"
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    ).execute()
    shown = "".join(str(c.get("outputs", "")) for c in notebook.cells)
    for words in SHOWS[file.stem]:
        assert words in shown
    assert shown.count("<table>") >= 4
