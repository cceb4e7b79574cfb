"""Tiny models, built once a session and copied for each test.

Nothing here imports torch before a test asks for it: the process that hands tests to workers runs none.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import json
import linecache
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from functools import cache
from inspect import unwrap
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from hfpatch.cli import main

if TYPE_CHECKING:
    import torch
    from torch import nn

ROOT = Path(__file__).parent.parent
OVERFLOWING = {"*post_feedforward_layernorm.weight": 24000.0}


STARTS = ("launch(", "process(", "python(", "subprocess.", "run(script")
"""What stands in a test that starts other processes."""
SLOW = ("ranks", "packaging", "notebooks", "heatmap", "foreign_hooks", "readme", "guard_ruin", "lifecycle")
"""Test files that start processes, draw pictures or go through every wrapper: `make quick` leaves them out."""


@cache
def starts_processes(function: FunctionType) -> bool:
    """True if a test's source has one of `STARTS`. Lines are counted, not parsed: there are thousands of tests."""
    code: CodeType = unwrap(function).__code__
    source = "".join(linecache.getlines(code.co_filename)[code.co_firstlineno - 1 : last_line(code)])
    return any(word in source for word in STARTS)


def last_line(code: CodeType) -> int:
    inner = (last_line(each) for each in code.co_consts if isinstance(each, CodeType))
    return max(*(line or 0 for _, _, line in code.co_lines()), *inner, 0)


def pytest_configure(config: pytest.Config) -> None:
    """Keep the proofs that plans run in a folder of this run, not in the user's cache."""
    if not hasattr(config, "workerinput"):  # workers get the environment of the process that starts them
        folder = tempfile.TemporaryDirectory(prefix="hfpatch-assets-")
        os.environ["HF_ASSETS_CACHE"] = folder.name
        config.add_cleanup(folder.cleanup)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what compiles, and what starts other processes."""
    for item in items:
        starts = starts_processes(item.function)  # type: ignore[attr-defined]
        if starts or "compile" in item.nodeid.lower() or item.path.stem.removeprefix("test_").endswith(SLOW):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let no garbage collection walk what is imported: transformers' Trainer makes a full one after each training."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # what could be collected is frozen too: to look for it takes longer than it is worth
        gc.set_threshold(20_000, 20, 20)  # a copy of a model makes thousands of objects that stay
        gc.enable()


@pytest.fixture(autouse=True, scope="session")
def quiet() -> None:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    import torch

    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def no_accelerator_left() -> None:
    """A process keeps the precision of its first Accelerator, and its last data loader; tests have several."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()


class Ran(NamedTuple):
    returncode: int
    stdout: str
    stderr: str

    @property
    def figures(self) -> dict[str, Any]:
        """What `--json` printed: strict JSON."""

        def refuse(word: str) -> None:
            raise AssertionError(f"{word} is no JSON")

        return json.loads(self.stdout, parse_constant=refuse)

    @property
    def text(self) -> str:
        """What it printed, in one line."""
        return " ".join(self.stdout.split())

    @property
    def last(self) -> str:
        return self.stdout.splitlines()[-1]

    @property
    def sentence(self) -> str:
        """The one line on stderr with which bad input ends."""
        assert self.stdout == ""
        (line,) = self.stderr.splitlines()
        assert line.startswith("hfpatch: ")
        return line


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """`here(VERB, ..., code=0)`: the command line at 80 columns, run in this process; it ends with `code`."""

    def run(*words: object, code: int = 0) -> Ran:
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setattr(sys, "argv", ["hfpatch", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        ran = Ran(int(end.value.code or 0), *capsys.readouterr())
        assert ran.returncode == code, ran
        return ran

    return run


def load_script(path: str) -> Any:
    """A script of the repository, by its path there, as a module; it finds the modules beside it."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, folder := str((ROOT / path).parent))
    sys.modules[module.__name__] = module  # dataclasses look for it there
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module


@cache
def _built(architecture: str) -> nn.Module:
    from hfpatch.lab.tiny import tiny_model

    return tiny_model(architecture)


@pytest.fixture
def tiny() -> Callable[[str], nn.Module]:
    """`tiny(architecture)`: a fresh copy of a tiny model."""
    return lambda architecture: copy.deepcopy(_built(architecture))


@pytest.fixture
def gemma(tiny: Callable[[str], nn.Module]) -> Iterator[nn.Module]:
    """A float16 Gemma 3 whose residual stream overflows."""
    from hfpatch.lab.tiny import rescale

    model = tiny("gemma3_text")
    rescale(model, {}, OVERFLOWING)
    yield model.half()


@pytest.fixture
def ids() -> torch.Tensor:
    import torch

    return (torch.arange(24).reshape(2, 12) * 7 + 3) % 64
