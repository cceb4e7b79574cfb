"""The house: private names behind one door, no circle of files, small modules, names that say which."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel, Trainer

from hfpatch.compat.operators import DispatchMode
from tests import house

ONE_THING = {"atlas", "projector"}
"""Folders whose main module has their name."""

BASES = (nn.Module(), PreTrainedModel, PreTrainedConfig, Trainer, torch.Tensor, TorchFunctionMode, DispatchMode)
FOREIGN = frozenset(n for base in BASES for n in dir(base) if n.startswith("_") and not n.startswith("__"))
"""Private names that classes of other packages give to those derived from them."""


@pytest.mark.slow
def test_private_names_of_other_packages_are_said_in_compat_alone() -> None:
    found = [
        f"{path.relative_to(house.ROOT)}:{line}: {name}"
        for path in house.files()
        if path.parent != house.DOORS
        for line, name in house.private_names(path, FOREIGN)
    ]
    assert not found, f"give these a plain name in hfpatch/compat, with a test in tests/test_compat.py: {found}"


@pytest.mark.parametrize(
    "code",
    [
        "x._version",
        "self._modules",
        "from torch import _dynamo",
        "from torch._C import functions",
        "import torch._dynamo",
        'getattr(x, "_hook")',
        'x.__dict__["_buffers"]',
        '"_orig_mod" in names',
        'KINDS = {"torch._dynamo.eval_frame.OptimizedModule": 1}',
        "super()._call_impl()",
    ],
)
def test_a_private_name_is_found(code: str, tmp_path: Path) -> None:
    (path := tmp_path / "module.py").write_text(f"{code}\n")
    assert [line for line, _ in house.private_names(path, FOREIGN)]


@pytest.mark.parametrize(
    "code",
    [
        "self._mine",
        "cls._made",
        "super()._tanh()",
        'name.endswith("_config")',
        'f"get_{kind}_features"',
        '"""Text about `_modules`."""',
        "from __future__ import annotations",
        "x.__dict__",
        '"call torch._dynamo.reset() first"',
    ],
)
def test_what_is_no_private_name_is_passed_over(code: str, tmp_path: Path) -> None:
    (path := tmp_path / "module.py").write_text(f"{code}\n")
    assert not list(house.private_names(path, FOREIGN))


def test_each_door_has_a_test() -> None:
    tests = house.tree(house.ROOT / "tests" / "test_compat.py")
    used = {node.attr for node in ast.walk(tests) if isinstance(node, ast.Attribute)}
    untested = {f"{module}.{name}" for module, names in house.doors().items() for name in names if name not in used}
    assert not untested


def test_compat_is_at_the_bottom() -> None:
    lower = ("hfpatch.compat", "hfpatch.errors")
    for path in house.DOORS.glob("*.py"):
        for node in ast.walk(house.tree(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hfpatch"):
                assert (node.module or "").startswith(lower), f"{path.name}:{node.lineno}"


def test_no_files_import_each_other_in_a_circle() -> None:
    assert not [sorted(circle) for circle in house.circles()]


def test_folders_and_modules_stay_small() -> None:
    assert not {folder: len(held) for folder, held in house.rooms().items() if len(held) > 20}
    assert not {str(path): count for path in house.files() if (count := house.lines(path)) > 400}


def test_a_name_says_which_module_it_is() -> None:
    assert house.namesakes().keys() == ONE_THING, house.namesakes()


def test_the_table_in_the_architecture_is_up_to_date() -> None:
    assert house.written() == house.table(), "python -m tests.house writes it"
