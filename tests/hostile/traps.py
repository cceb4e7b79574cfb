"""Traps behind the doors of a checkpoint: each notes that it was sprung.

A module on the path that a file could name, a fake `kernels` package that a file could have asked, code in the
checkpoint's own folder, and what Python's audit hooks tell: sockets, other processes, and pickles that name a class.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EVIL = "evil_hfpatch_trap"
"""Name of the module that nobody may import."""
AUDITED = ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.exec", "pickle.find_class")

KERNELS = {
    "kernels/__init__.py": """
import os
def asked(*words, **_):
    with open(os.environ["TRAPS"], "a") as file:
        file.write(f"kernels asked for {words}\\n")
    raise ValueError("kernels was asked")
class Thing:
    def __init__(self, *_, **__): pass
    __enter__ = __exit__ = lambda *_: None
CUDAProperties = Device = KernelizeFallback = LayerRepository = LocalLayerRepository = ROCMProperties = Thing
use_kernel_mapping = Thing
class Mode:
    INFERENCE, TRAINING = 1, 2
def unchanged(*_, **__): return lambda thing: thing
use_kernel_forward_from_hub = use_kernelized_func = unchanged
def register_kernel_mapping(*_, **__): pass
replace_kernel_forward_from_hub = register_kernel_mapping
get_kernel = kernelize = has_kernel = install_kernel = load_kernel = get_local_kernel = asked
""",
    "kernels/layer/__init__.py": "",
    "kernels/layer/mode.py": "from kernels import Mode\n",
}

_armed: list[list[str]] = []


def _audit(event: str, words: tuple[Any, ...]) -> None:
    if _armed and (event in AUDITED or (event == "import" and words[0] == EVIL)):
        _armed[-1].append(f"{event} {words!r:.200}")


def trap_code(place: str) -> str:
    """Source that notes that it ran; `place` says where it stood."""
    return f"""
import os
with open(os.environ["TRAPS"], "a") as file:
    file.write({place!r} + " ran\\n")
raise RuntimeError("a trap ran")
"""


def install(folder: Path, kernels_version: str | None = None) -> Path:
    """Write the module that nobody may import, and a fake `kernels` of some release, into a folder for `sys.path`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{EVIL}.py").write_text(trap_code("a module that a file named"))
    if kernels_version is not None:
        for name, source in KERNELS.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(source)
        about = folder / f"kernels-{kernels_version}.dist-info"
        about.mkdir(exist_ok=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {kernels_version}\n")
    return folder


@contextmanager
def armed(notes: Path) -> Generator[list[str]]:
    """Give the list of the traps that were sprung inside; complete only after the end."""
    if not getattr(sys, "_hfpatch_traps", False):
        sys.addaudithook(_audit)  # cannot be removed; it does nothing while no trap is armed
        sys._hfpatch_traps = True  # type: ignore[attr-defined]
    was = os.environ.get("TRAPS")
    os.environ["TRAPS"] = str(notes)
    notes.write_text("")
    sprung: list[str] = []
    _armed.append(sprung)
    try:
        yield sprung
    finally:
        _armed.remove(sprung)
        sprung.extend(notes.read_text().splitlines())
        os.environ.pop("TRAPS", None)
        if was is not None:
            os.environ["TRAPS"] = was
