"""Python in other processes, forked from one that has imported torch and transformers, which takes each seconds.

Of hfpatch that one has imported nothing. What is about the start of an interpreter runs `sys.executable` instead.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch.distributed.fsdp", "accelerate", "peft", "transformers.trainer"])
SECONDS = 240


def started(words: tuple[str, ...], env: Mapping[str, str], cwd: Path, out: Path, err: Path) -> BaseProcess:
    """Begin what `python WORDS` would do, for `-m` and `-c`, with its output in two files."""
    process = SERVER.Process(target=_run, args=(words, dict(env), cwd, out, err))
    process.start()
    return process


def python(*words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> CompletedProcess[str]:
    """What `subprocess.run` gives of `python WORDS`, with more variables in its environment."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = started(words, {**os.environ, **(env or {})}, cwd or Path.cwd(), out, err)
        process.join(SECONDS)
        process.kill()
        process.join()
        return CompletedProcess(words, process.exitcode or 0, out.read_text(), err.read_text())


def _run(words: tuple[str, ...], env: Mapping[str, str], cwd: Path, out: Path, err: Path) -> None:
    import torch

    for stream, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    torch.set_num_threads(1)
    sys.path[:0] = ["", *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    way, what, *rest = words
    sys.argv = [way, *rest]
    if way == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), main.__dict__)  # noqa: S102 - the test's own
