"""Adding a patch is one file: each of two is dropped into a copy of the checkout, whose quick suite then passes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.conftest import ROOT
from tests.test_authoring import PATCH

NOTE = '''\
"""Writes a note on a model.

## What goes wrong
The model has no note.

## What this changes
It gets the attribute `my_note`.

## Numerics
exact: nothing that is computed changes.

## Known limits
None are known.

## Sources
This test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfpatch.patching import edits, select
from hfpatch.patching.language import ANY, Case, NotNeeded, Offered, Patch, Verdict

if TYPE_CHECKING:
    from hfpatch.patching.context import Context
    from hfpatch.patching.verifying.trial import Trial


def condition(context: Context) -> Verdict:
    """Offered for every submodel."""
    return NotNeeded("it has no submodel") if context.submodel is None else Offered("it has no note", suggested=False)


def symptom(trial: Trial) -> str | None:
    """The model has no note."""
    return None if "my_note" in vars(trial.model) else "it has no note"


PATCH = Patch(
    title="A note on any model",
    architectures=(ANY,),
    condition=condition,
    edits=(edits.set_attribute(select.submodel(), "my_note", lambda _context, _target: 1, "write a note"),),
    effect="exact",
    symptom=symptom,
    repros=(Case("llama"),),
    leaves_alone=(Case("gpt2"),),
)
'''

DROPPED = {"gemma2/lost_logit_cap.py": PATCH, "shared/any_note.py": NOTE}
"""Files in `patches/`: the patch of docs/authoring.md in a new family, and one for every architecture."""

OWN = {
    "test_repro_shows_the_symptom_and_the_patch_cures_it",
    "test_leaves_alone_what_it_must",
    "test_life_of_each_kind_of_edit",
    "test_a_patch_is_applied_found_and_reverted",
    "test_explain",
}
"""Tests that each patch has a case of."""


@pytest.fixture
def copy_of_the_checkout(tmp_path: Path) -> Path:
    """What git would commit, in a folder of its own."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


def quick() -> list[str]:
    """The marks that `make quick` gives to pytest."""
    recipe = (ROOT / "Makefile").read_text().partition("\nquick:")[2].partition("\n\n")[0]
    (marks,) = re.findall(r'-m "[^"]+"', recipe)
    return shlex.split(marks)


@pytest.mark.thorough
def test_a_file_dropped_into_a_copy_of_the_checkout_passes_the_suite(copy_of_the_checkout: Path) -> None:
    copy = copy_of_the_checkout
    for name, text in DROPPED.items():
        file = copy / "patches" / name
        assert not file.exists()
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *quick(), "-n", "2", "--dist", "worksteal", "--junitxml", "report.xml"]
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stdout[-6000:]

    cases = ElementTree.parse(copy / "report.xml").getroot().findall(".//testcase")  # noqa: S314 - pytest wrote it
    passed = [case.get("name", "") for case in cases if len(case) == 0 or case[0].tag in ("system-out", "properties")]
    assert len(passed) > 1000
    for name in DROPPED:
        patch = Path(name).stem.replace("_", "-")
        assert {test.partition("[")[0] for test in passed if f"[{patch}" in test} >= OWN, patch
