"""Proves a patch on a class of the user's own: a tiny model is built from its config, offline, in another process."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hfpatch.errors import InputError
from hfpatch.lab.shrink import shrunk_like
from hfpatch.lab.tiny import tiny_of_class
from hfpatch.patching import registry
from hfpatch.patching.proofs.proof import Proof, Subject
from hfpatch.patching.proofs.prove import prove
from hfpatch.patching.registry import Entry
from hfpatch.patching.verifying.case import Case

SECONDS = 120
"""Limit of the other process."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def prove_own(entry: Entry, model: PreTrainedModel, about: Subject) -> Proof:
    """Run the repros of a patch on a tiny model of a class that is not transformers' own.

    Args:
        entry: The patch; one in a file that the other process finds too.
        model: The submodel. Its class and that of its config must be in modules that can be imported.
        about: What the proof has to be about.
    """
    cls, config = type(model), model.config
    if cls.__module__.startswith("transformers."):
        return Proof(about, "untried", f"{cls.__name__} itself is transformers' own, and does not build such layers")
    for each in (cls, type(config)):
        if each.__module__ == "__main__" or "<locals>" in each.__qualname__:
            why = f"{each.__name__} is defined in the running script or in a function; put it into a module"
            return Proof(about, "untried", why)
    if registry.get(entry.id).file != entry.file or entry.registered:
        return Proof(about, "untried", f"{entry.id} is registered in this process only")
    if not hasattr(os, "killpg"):
        return Proof(about, "untried", "on this system another process cannot be stopped with its children")
    try:
        asked = {
            "path": sys.path,
            "patch": entry.id,
            "about": Proof(about, "untried", "").to_dict(),
            "model": [cls.__module__, cls.__qualname__],
            "config": [type(config).__module__, type(config).__qualname__, config.to_dict()],
        }
        return _answer(json.dumps(asked, default=str), about)
    except (TypeError, ValueError, RecursionError) as error:
        return Proof(about, "untried", f"its config cannot be written as JSON: {error}")


def _answer(asked: str, about: Subject) -> Proof:
    """Ask another process for the proof; it and its children are stopped when it ends, or after `SECONDS`."""
    command = [sys.executable, "-m", "hfpatch.patching.proofs.own"]
    path = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, **OFFLINE, "PYTHONPATH": path},
    ) as process:
        try:
            told, _ = process.communicate(asked, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return Proof(about, "untried", f"the other process did not finish in {SECONDS} s")
        finally:
            with contextlib.suppress(ProcessLookupError):  # none is left
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0 or not told:
        return Proof(about, "untried", f"the other process ended with {process.returncode}")
    return Proof.from_dict(json.loads(told))


def _prove(asked: Mapping[str, Any]) -> Proof:
    about = Proof.from_dict(asked["about"]).subject
    module, name, values = asked["config"]
    config: Any = _named(module, name).from_dict(values)
    cls = _named(*asked["model"])

    def make(case: Case) -> PreTrainedModel:
        if case.layers is not None:
            with contextlib.suppress(InputError):  # its config allows no other depth
                return _tiny(cls, config, {**case.config, "num_hidden_layers": case.layers})
        return _tiny(cls, config, case.config)

    proof = prove(registry.get(asked["patch"]), about.architecture, about, make)
    return proof or Proof(about, "untried", "its tiny model has no such submodel that reads tokens")


def _tiny(cls: Any, config: Any, overrides: Mapping[str, Any]) -> PreTrainedModel:
    try:
        small = shrunk_like(config, **overrides)
    except (ValueError, TypeError, IndexError) as error:
        raise InputError(f"{type(config).__name__} rejects {', '.join(overrides)}: {error}") from error
    return tiny_of_class(cls, small)


def _named(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _main() -> None:
    asked = json.load(sys.stdin)
    sys.path[:] = asked["path"]
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)  # what the user's module prints is no answer
        proof = _prove(asked)
        answer.write(json.dumps(proof.to_dict()))


if __name__ == "__main__":
    _main()
