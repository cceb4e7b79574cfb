"""The patches are found from a wheel, an sdist, an editable install and the checkout itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LISTS = "import hfpatch; print(*sorted(e.id for e in hfpatch.list_patches())); print(hfpatch.__file__)"
WANT = sorted(p.stem.replace("_", "-") for p in (ROOT / "patches").rglob("*.py"))


def run(*words: str, cwd: Path, path: Path | None = None) -> str:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run([sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist, and a wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT), cwd=out)
    return out


def unpacked(wheel: Path, into: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(into)
    return into


def test_wheel_through_sdist(dist: Path, tmp_path: Path) -> None:
    site = unpacked(next(dist.glob("*.whl")), tmp_path / "site")
    assert not (site / "patches").exists()
    assert (site / "hfpatch" / "patches" / "shared").is_dir()
    ids, file = run("-S", "-c", _with_site(LISTS), cwd=tmp_path, path=site).splitlines()
    assert ids.split() == WANT
    assert Path(file).is_relative_to(site)


def test_sdist_holds_what_a_build_needs(dist: Path, tmp_path: Path) -> None:
    import tarfile

    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert {p.name for p in source.iterdir()} >= {
        "hfpatch",
        "patches",
        "tests",
        "README.md",
        "LICENSE",
        "hatch_build.py",
    }
    ids = run("-c", LISTS, cwd=source, path=source).splitlines()[0]
    assert ids.split() == WANT


def test_editable_wheel_points_at_the_checkout_and_copies_nothing(tmp_path: Path) -> None:
    script = "from hatchling.build import build_editable; import sys; print(build_editable(sys.argv[1]))"
    name = run("-c", script, str(tmp_path), cwd=ROOT).split()[-1]
    site = unpacked(tmp_path / name, tmp_path / "site")
    assert not (site / "hfpatch").exists()
    (pth,) = site.glob("*.pth")
    assert Path(pth.read_text().strip()) == ROOT


def test_checkout(tmp_path: Path) -> None:
    ids, file = run("-c", LISTS, cwd=tmp_path, path=ROOT).splitlines()
    assert ids.split() == WANT
    assert Path(file).is_relative_to(ROOT)


def _with_site(script: str) -> str:
    """Without `site`, so that an editable install does not shadow the wheel; dependencies by plain path."""
    paths = [p for p in sys.path if p.endswith("site-packages")]
    return f"import sys; sys.path += {paths!r}\n{script}"


def test_the_oldest_python_is_stated_once() -> None:
    """In pyproject.toml; what else needs it says the same."""
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    oldest = project["requires-python"].removeprefix(">=")
    assert f'pythonVersion = "{oldest}"' in text
    assert f'target-version = "py{oldest.replace(".", "")}"' in text
    assert f"with Python {oldest} or newer" in (ROOT / "README.md").read_text()
