"""The notebooks: run, written with their outputs, and read for what is stable in these.

`python -m tests.notebooks [NAME ...]` runs them and writes them with their outputs. 03 wants GEMMA: a folder with
Gemma 3 270M.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
MEASURED = re.compile(r"[-+]?\d[\d,.]*(e[-+]?\d+)?")
"""A figure."""
PRIVATE = re.compile(
    r"/(tmp|root|home|work|usr|opt|Users)/|[A-Za-z]:\\\\|https?://(?!huggingface\.co)[\w.]*(simple|pypi)"
)
"""A path of a machine, or the address of a registry."""


FOREIGN = ("IProgress not found", "`is_gradient_checkpointing` is deprecated")
"""Beginnings of warnings of tqdm (which asks for ipywidgets) and of transformers (which PEFT calls)."""
WAITING = re.compile(r"^hfpatch: .* so far$", re.MULTILINE)
"""A line that only a slow machine shows."""


def run(file: Path, **env: str) -> Any:
    """A notebook with the outputs of a new run, under more variables of the environment."""
    notebook = nbformat.read(file, as_version=4)
    resources = {"metadata": {"path": str(FOLDER)}}
    quiet = ",".join(f"ignore:{words}" for words in FOREIGN)
    client = NotebookClient(notebook, timeout=180, kernel_name="python3", resources=resources, coalesce_streams=True)
    client.execute(env={**os.environ, "PYTHONWARNINGS": quiet, "COLUMNS": "100", **env})
    return notebook


def words(cell: Any) -> list[tuple[str, str]]:
    """Kind and text of what a cell shows, without figures, spaces and pictures: what is the same in each run."""
    found: list[tuple[str, str]] = []
    for output in cell.get("outputs", ()):
        kind = output["output_type"] if output["output_type"] != "stream" else output["name"]
        if kind == "stderr":  # of other packages
            continue
        text = WAITING.sub("", output.get("text") or output.get("data", {}).get("text/plain", ""))
        plain = " ".join(MEASURED.sub("#", text).split())
        if found and found[-1][0] == kind == "stdout":  # one stream may come in several pieces
            found[-1] = kind, f"{found[-1][1]} {plain}"
        elif plain:
            found.append((kind, plain))
    return found


def shown(cell: Any) -> str:
    """All that a cell shows, as text and as HTML."""
    return "".join(
        "".join([output.get("text", ""), *map(str, output.get("data", {}).values())])
        for output in cell.get("outputs", ())
    )


def main() -> None:
    """Run notebooks and write them."""
    for file in sorted(FOLDER.glob("*.ipynb")):
        if len(sys.argv) == 1 or file.stem in sys.argv[1:]:
            start = time.perf_counter()
            notebook = run(file)
            for cell in notebook.cells:
                cell.metadata.pop("execution", None)  # when it ran
                for output in cell.get("outputs", ()):
                    if "text" in output:
                        output["text"] = WAITING.sub("", output["text"])
                if "outputs" in cell:
                    cell["outputs"] = [output for output in cell["outputs"] if output.get("text", "text").strip()]
            notebook.metadata = {
                "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
                "language_info": {"name": "python"},
            }
            nbformat.write(notebook, file)
            print(f"{file.name}: {time.perf_counter() - start:.0f} s, {file.stat().st_size / 1024:.0f} KiB", flush=True)


if __name__ == "__main__":
    main()
