"""The window of releases that pyproject.toml states: hfpatch installed there by pip, with nothing else, does its work.

`lowest` installs the sdist with each dependency at its lower bound, `newest` the wheel with what pip takes by itself.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clean.environment import Environment, build
from tests.conftest import ROOT

pytestmark = pytest.mark.clean
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def lowest() -> list[str]:
    """Each dependency at its lower bound: `torch==2.11`."""
    found = [re.match(r"([\w-]+)>=([\d.]+)", each) for each in PROJECT["dependencies"]]
    assert all(found), "each dependency has a lower bound, which comes first"
    return [f"{each[1]}=={each[2]}" for each in found if each]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist and a wheel."""
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is gone after the test: an environment takes gigabytes."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize(("window", "what"), [("lowest", "*.tar.gz"), ("newest", "*.whl")])
def test_every_verb_works(window: str, what: str, dist: Path, folder: Path) -> None:
    environment = Environment.made(folder / "env")
    (archive,) = dist.glob(what)
    pinned = lowest() if window == "lowest" else []
    environment.install(str(archive), constraints=pinned)
    versions = environment.versions()
    print({name: versions[name] for name in ("torch", "transformers", "peft", "accelerate", "numpy", "typer")})
    for each in pinned:
        name, _, version = each.partition("==")
        got = versions[name.lower().replace("_", "-")].partition("+")[0]
        assert got.startswith(version), f"{name}: asked for {version}, got {got}"
    assert "pytest" not in versions, "nothing but hfpatch and what it needs"
    (work := folder / "work").mkdir()
    said = environment.run(str(ROOT / "tests" / "clean" / "smoke.py"), str(work), cwd=work)
    *parts, file = [line for line in said.splitlines() if line.endswith(": works") or line.endswith("__init__.py")]
    assert len(parts) == 6
    assert Path(file).is_relative_to(environment.folder)
