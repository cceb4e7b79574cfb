"""Every notebook runs from top to bottom, and shows what it says it shows."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.ipynb")), ids=lambda p: p.stem)
def test_runs(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    assert all(not c.get("outputs") for c in notebook.cells), "notebooks are kept without outputs"
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    ).execute()
    shown = "".join(str(c.get("outputs", "")) for c in notebook.cells)
    assert "finite logits: 0 of 1536" in shown
    assert shown.count("<table>") >= 4
    assert "before 0.0001" in shown
    assert "after  1e-06" in shown
    assert "opt-in" in shown
