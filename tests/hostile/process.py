"""Goes through the doors of a config in a process of its own, where a fake `kernels` package is installed.

`python -m tests.hostile.process CHECKPOINT BUNDLE FOLDER` prints a line of JSON: which traps were sprung, by door and
verb.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from pathlib import Path

VERBS: dict[str, tuple[str, ...]] = {
    "inspect": ("MODEL",), "plan": ("MODEL",), "check": ("MODEL",), "trace": ("MODEL",), "verify": ("MODEL",),
    "doctor": ("MODEL",), "replay": ("BUNDLE", "--model", "MODEL"),
    "prove": ("fp16-residual-overflow", "--architecture", "MODEL"),
}  # fmt: skip
"""The words of a command, where those in capitals stand for folders."""


def run() -> None:
    from transformers import AutoModelForCausalLM
    from transformers.utils import is_kernels_available

    from hfpatch.cli import main
    from tests.hostile import doors, traps

    healthy, bundle, work = map(Path, sys.argv[1:4])
    work.mkdir()
    found: dict[str, list[str]] = {}
    cases = 0
    for number, (door, plant) in enumerate(doors.MODEL.items()):
        folder = Path(shutil.copytree(healthy, work / str(number)))
        plant(folder)
        folders = {"MODEL": str(folder), "BUNDLE": str(bundle)}
        for verb, words in VERBS.items():
            sys.argv = ["hfpatch", verb, *(folders.get(word, word) for word in words)]
            quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
            with traps.armed(work / "notes") as sprung, quiet[0], quiet[1], contextlib.suppress(SystemExit):
                main()
            cases += 1
            if sprung:
                found[f"{door}: {verb}"] = sprung
    folder = Path(shutil.copytree(healthy, work / "control"))
    doors.MODEL["a kernel"](folder)
    with traps.armed(work / "notes") as control, contextlib.suppress(ValueError):
        AutoModelForCausalLM.from_pretrained(folder)
    print(json.dumps({"kernels": is_kernels_available(), "control": control, "sprung": found, "cases": cases}))


if __name__ == "__main__":
    run()
