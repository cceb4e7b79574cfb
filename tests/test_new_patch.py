"""`hfpatch new`: what it writes loads, does nothing, and is overwritten by nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hfpatch
from hfpatch import patches, testing
from hfpatch.patching import registry
from hfpatch.patching.language import HEADINGS
from hfpatch.patching.registering import new_patch
from tests.conftest import ROOT, Ran


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkout with an empty `patches/`, in the current directory."""
    (tmp_path / "patches").mkdir()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(patches, "__path__", [str(tmp_path / "patches"), *patches.__path__])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for patch_id in registry.by_hand():
        hfpatch.unregister(patch_id)


def test_in_a_checkout(checkout: Path, here: Callable[..., Ran], tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = here("new", "gemma2/soft-cap")
    file = checkout / "patches" / "gemma2" / "soft_cap.py"
    assert ran.stdout.splitlines() == [
        f"wrote {file}",
        "next: fill in each TODO; hfpatch verify soft-cap",
    ]
    registry._discover.cache_clear()
    try:
        entry = registry.entries()["soft-cap"]
        assert (entry.family, entry.patch.architectures, entry.origin) == ("gemma2", ("gemma2",), "")
        assert tuple(entry.sections)[1:] == HEADINGS
        assert all(text.startswith("TODO") for heading, text in entry.sections.items() if heading)
        assert registry.broken() == {}
        model = tiny("gemma2")
        made = hfpatch.plan(model, include="soft-*")
        assert [d.decided for d in made.decisions if d.patch == "soft-cap"] == ["not needed"]
        assert hfpatch.plan(model, only="soft-cap").edits == ()
        assert [r.word for r in testing.prove_patch(entry)] == ["failed", "passed"]  # it is not written yet
        assert "no symptom" in testing.prove_patch(entry)[0].text
    finally:
        registry._discover.cache_clear()
        for name in [n for n in sys.modules if n.startswith("hfpatch.patches.gemma2")]:
            del sys.modules[name]


def test_what_it_writes_is_as_this_house_writes(checkout: Path, here: Callable[..., Ran]) -> None:
    here("new", "gemma2/soft-cap")
    config = ["--config", str(ROOT / "pyproject.toml"), "--config", f"src = ['{ROOT}']", "--no-cache", "patches"]
    for words in (("check",), ("format", "--check")):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, *config], capture_output=True, text=True, check=False, cwd=checkout
        )
        assert done.returncode == 0, done.stdout
    assert len(Path("patches/gemma2/soft_cap.py").read_text().splitlines()) < 70


def test_in_a_package(checkout: Path, here: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    ran = here("new", "shared/soft-cap", "--package", "acme-patches")
    home = Path("acme-patches")
    module = home / "acme_patches"
    files = [home / "pyproject.toml", module / "__init__.py", module / "shared" / "__init__.py"]
    files.append(module / "shared" / "soft_cap.py")
    assert ran.stdout.splitlines() == [
        *(f"wrote {file}" for file in files),
        "next: fill in each TODO; after `pip install -e acme-patches`: hfpatch verify soft-cap",
    ]
    assert sorted(p for p in home.rglob("*") if p.is_file()) == sorted(files)
    project = tomllib.loads(files[0].read_text())
    assert project["project"]["entry-points"]["hfpatch.patches"] == {"soft-cap": "acme_patches.shared.soft_cap"}
    assert hfpatch.register(files[-1]) == "soft-cap"
    assert registry.get("soft-cap").patch.architectures == ("llama",)


def test_the_package_that_it_writes_is_built_and_found(checkout: Path, here: Callable[..., Ran]) -> None:
    """Built by hatchling and installed by pip, without a network."""
    here("new", "llama/soft-cap", "--package", "acme-patches")
    command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "--quiet"]
    done = subprocess.run(
        [*command, "--target", "site", "--disable-pip-version-check", "./acme-patches"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout / "site"), str(ROOT)])}
    words = [sys.executable, "-m", "hfpatch.cli", "explain", "soft-cap"]
    told = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert "acme-patches 0.1.0" in told.stdout
    assert "TODO" in told.stdout


def test_nothing_is_overwritten(checkout: Path, here: Callable[..., Ran]) -> None:
    here("new", "llama/soft-cap")
    here("new", "llama/soft-cap", "--package", "acme")
    for words, file in (
        ((), checkout / "patches" / "llama" / "soft_cap.py"),
        (("--package", "acme"), Path("acme") / "pyproject.toml"),
    ):
        file.write_text("mine")
        ran = here("new", "llama/soft-cap", *words, code=2)
        assert ran.sentence == f"hfpatch: new: {file} exists already; nothing was written"
        assert file.read_text() == "mine"
    (checkout / "half").mkdir()
    (checkout / "half" / "half").touch()
    ran = here("new", "llama/soft-cap", "--package", "half", code=2)
    assert ran.sentence == "hfpatch: new: half/half exists already; nothing was written"
    assert [path.name for path in (checkout / "half").iterdir()] == ["half"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        *(
            ((name,), "is not FAMILY/DEFECT")
            for name in ("soft-cap", "a/b/c", "../x", "llama/", "/x", "Llama/x", "a/1")
        ),
        (("llama/class",), "is not FAMILY/DEFECT"),
        (("llama/architecture",), "a file architecture.py is not read as a patch"),
        (("llama/eps-alignment",), "the id 'eps-alignment' is that of a patch of hfpatch itself; choose another name"),
        (("llama/x", "--package", "../up"), "--package '../up': want small letters, digits and hyphens"),
        (("llama/x", "--package", "json"), "--package json: Python has a module json"),
        (("llama/x", "--package", "hfpatch"), "--package hfpatch: Python has a module hfpatch, or hfpatch is"),
    ],
)
def test_bad_names(checkout: Path, here: Callable[..., Ran], words: tuple[str, ...], sentence: str) -> None:
    before = sorted(checkout.rglob("*"))
    assert sentence in here("new", *words, code=2).sentence
    assert sorted(checkout.rglob("*")) == before


def test_an_installed_hfpatch_has_no_checkout(tmp_path: Path, monkeypatch: Any, here: Callable[..., Ran]) -> None:
    monkeypatch.setattr(patches, "__path__", [str(tmp_path / "site-packages" / "hfpatch" / "patches")])
    ran = here("new", "llama/x", code=2)
    assert ran.sentence.startswith("hfpatch: new: this hfpatch is installed, not a checkout; --package NAME writes")


def test_it_needs_no_torch() -> None:
    script = f"import sys; import {new_patch.__name__}; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, cwd=ROOT).returncode == 0
