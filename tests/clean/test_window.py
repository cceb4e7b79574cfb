"""Both ends of the window of releases: hfpatch installed there by pip, with nothing else, does its work.

The sets are in releases.toml. `lowest` installs the sdist, `newest` the wheel, each into a fresh environment. Every
verb is run there; then pytest is added, and the core of the tests runs on what was installed, not on the checkout.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.releases import pins, sets
from tests.clean.environment import Environment, build
from tests.conftest import ROOT

pytestmark = pytest.mark.clean
CORE = (
    "compat",  # a test for each private name of another package
    "contract",  # each patch's own repros, what it leaves alone, its life and its revert
    "plan_apply",
    "revert_properties",
    "fp16",
    "trace_faults",
    "guard",
    "check",
    "lora",
)
"""The core of the tests: what hfpatch promises, where other packages may have changed."""
NEEDS = ("pytest", "hypothesis")
"""What the core needs beside hfpatch."""
GIB = 1 << 30
ROOM = 12 * GIB
"""An environment has up to 6 GiB, and pip unpacks beside it."""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist and a wheel."""
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is gone after the test: an environment takes gigabytes."""
    free = shutil.disk_usage(tmp_path).free
    assert free > ROOM, f"{tmp_path} has {free / GIB:.1f} GiB left; a fresh environment needs {ROOM / GIB:.0f} GiB"
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize(("name", "archive"), [("lowest", "*.tar.gz"), ("newest", "*.whl")])
def test_every_verb_and_the_core_of_the_tests(name: str, archive: str, dist: Path, folder: Path) -> None:
    environment = Environment.made(folder / "env")
    (file,) = dist.glob(archive)
    wanted = sets()[name]
    environment.install(str(file), constraints=[f"{package}=={release}" for package, release in wanted.items()])
    versions = environment.versions()
    got = {package: versions[package.lower().replace("_", "-")].partition("+")[0] for package in wanted}
    assert got == wanted
    assert "pytest" not in versions, "nothing but hfpatch and what it needs"
    every_verb(environment, folder / "work")
    environment.install(*NEEDS, constraints=[f"{package}=={pins()[package]}" for package in NEEDS])
    core(environment, folder / "core")
    now = environment.versions()
    assert {package: now[package] for package in versions} == versions, "what the core needs changed what is tested"


def every_verb(environment: Environment, work: Path) -> None:
    work.mkdir()
    said = environment.run(str(ROOT / "tests" / "clean" / "smoke.py"), str(work), cwd=work)
    *parts, file = [line for line in said.splitlines() if line.endswith(": works") or line.endswith("__init__.py")]
    assert len(parts) == 7
    assert Path(file).is_relative_to(environment.folder)


def core(environment: Environment, work: Path) -> None:
    """Run the core in a folder that has the tests and not the code."""
    work.mkdir()
    shutil.copy(ROOT / "pyproject.toml", work)
    for each in ("tests", "benchmarks"):
        shutil.copytree(ROOT / each, work / each, ignore=shutil.ignore_patterns("__pycache__", "results"))
    files = [f"tests/test_{each}.py" for each in CORE]
    quick = "not slow and not thorough"
    words = ("-q", "-p", "no:cacheprovider", "--tb=short", "--junitxml=core.xml", "-m", quick)
    environment.run("-m", "pytest", *words, *files, cwd=work)
    suite = ElementTree.parse(work / "core.xml").getroot().find("testsuite")  # noqa: S314 - pytest wrote it just now
    assert suite is not None
    ran, skipped = (int(suite.attrib[each]) for each in ("tests", "skipped"))
    print(f"{environment.folder.parent.name}: {ran} tests, {skipped} skipped, {float(suite.attrib['time']):.0f} s")
    assert ran > 400
    why = [said.attrib["message"] for said in suite.iter("skipped")]
    assert all("needs a CUDA device" in each for each in why), why
