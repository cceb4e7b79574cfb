"""Goes through the doors of a config in a process of its own, where a fake `kernels` package is installed.

`python -m tests.hostile.process CHECKPOINT FOLDER` prints a line of JSON: which traps were sprung, by door and verb.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from pathlib import Path

VERBS = ("inspect", "plan", "check", "trace")


def run() -> None:
    from transformers import AutoModelForCausalLM
    from transformers.utils import is_kernels_available

    from hfpatch.cli import main
    from tests.hostile import doors, traps

    healthy, work = Path(sys.argv[1]), Path(sys.argv[2])
    work.mkdir()
    found: dict[str, list[str]] = {}
    cases = 0
    for number, (door, plant) in enumerate(doors.MODEL.items()):
        folder = Path(shutil.copytree(healthy, work / str(number)))
        plant(folder)
        for verb in VERBS:
            sys.argv = ["hfpatch", verb, str(folder)]
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
