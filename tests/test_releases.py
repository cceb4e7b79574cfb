"""What changed between two releases, and the window of releases that is supported: bounds, sets, page."""

from __future__ import annotations

import ast
import dataclasses
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from docs import releases as page
from docs.releases import pins, sets
from hfpatch.patching.language import Patch
from hfpatch.patching.proofs.bodies import body_digest, digest
from tests import releases
from tests.conftest import ROOT

MODELING = """
import torch
class Layer(torch.nn.Module):
    def forward(self, x: int) -> int:
        '''Doubles.'''
        return x * 2
class Other(torch.nn.Module):
    def forward(self, x):
        return x
"""
NAMES = """
class Config:
    def _init_weights(self):
        return 1
    def _get_name(self):
        self._attn_implementation = None
"""


def installed(place: Path, release: str, modeling: str, names: str) -> Path:
    folder = place / "lib" / "python3.11" / "site-packages"
    (folder / "transformers" / "models" / "own").mkdir(parents=True)
    (folder / f"transformers-{release}.dist-info").mkdir()
    (folder / "transformers" / "models" / "own" / "modeling_own.py").write_text(modeling)
    (folder / "transformers" / "modeling_utils.py").write_text(names)
    return place


def test_what_changed_is_named_with_the_patches_it_touches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = installed(tmp_path / "old", "5.1.0", MODELING, NAMES)
    reworded = MODELING.replace("Doubles.", "Twice.").replace("x: int", "x: float")
    other = reworded.replace("x * 2", "x + x")
    less = NAMES.replace("self._attn_implementation = None", "pass").replace("return 1", "return 2")
    new = installed(tmp_path / "new", "5.2.0+cpu", other, less)
    layer = next(n for n in ast.walk(ast.parse(MODELING)) if isinstance(n, ast.FunctionDef))
    monkeypatch.setattr(releases, "leaning", lambda: {body_digest(layer): {"some-patch": {"own", "llama"}}})
    monkeypatch.setattr(releases, "patches_through", lambda door: (f"through-{door}",))
    told, found = releases.changes(releases.site_packages(old), releases.site_packages(new))
    assert told == {"transformers": ("5.1.0", "5.2.0"), "torch": ("", ""), "peft": ("", "")}
    body, *names = found
    assert body.name == "transformers/models/own/modeling_own.py: Layer.forward"
    assert (body.what, body.leans, body.patches) == ("new body", ("llama", "own"), ("some-patch",))
    by_name = {change.name.partition(" in ")[0]: change for change in names}
    assert by_name["_attn_implementation"].what == "no longer defined"
    assert by_name["_attn_implementation"].leans == ("implementation",)
    assert "through-initial" in by_name["_init_weights"].patches
    same = installed(tmp_path / "same", "5.1.1", reworded, NAMES)
    assert releases.changes(releases.site_packages(old), releases.site_packages(same))[1] == []
    with pytest.raises(SystemExit, match="none of transformers, torch, peft is installed there"):
        releases.site_packages(tmp_path)


def test_a_body_in_a_file_has_the_digest_that_proofs_have() -> None:
    import inspect

    from transformers.models.llama import modeling_llama

    folder = Path(inspect.getfile(modeling_llama)).parents[3]
    tree = ast.parse(Path(inspect.getfile(modeling_llama)).read_text())
    layer = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == "LlamaMLP")
    forward = next(n for n in layer.body if isinstance(n, ast.FunctionDef) and n.name == "forward")
    assert body_digest(forward) == digest(modeling_llama.LlamaMLP.forward)
    assert releases.release(folder, "transformers")


@pytest.mark.slow
def test_the_patches_behind_a_private_name() -> None:
    every = set(releases.registry.entries())
    assert set(releases.patches_through("hooks")) == every, "all edits are written by one engine"
    assert releases.doors()["_attn_implementation"] == {"implementation"}
    assert releases.leaning()


WINDOW = {
    each.name: each.specifier
    for each in map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
}


def test_patches_that_state_no_window_have_that_of_the_project() -> None:
    default = next(f.default for f in dataclasses.fields(Patch) if f.name == "transformers")
    assert Requirement(f"transformers{default}").specifier == WINDOW["transformers"]


def test_the_sets_of_releases_are_about_what_the_project_needs() -> None:
    for name, found in sets().items():
        assert list(found) == list(WINDOW), name
        assert all(Version(release) in WINDOW[package] for package, release in found.items()), name


def test_the_lowest_are_the_lower_bounds() -> None:
    for package, release in sets()["lowest"].items():
        (bound,) = (part.version for part in WINDOW[package] if part.operator == ">=")
        assert Version(release) == Version(bound), package


def test_the_tested_are_pinned_for_everything_else() -> None:
    found = sets()
    assert found["tested"] == {package: pins()[package] for package in WINDOW}
    for package, release in found["newest"].items():
        assert Version(release) >= Version(found["tested"][package]) >= Version(found["lowest"][package]), package


def test_the_page_has_the_sets() -> None:
    assert page.filled(page.PAGE.read_text()) == page.PAGE.read_text(), "python -m docs.releases writes it"
    assert f"| transformers | {sets()['lowest']['transformers']} |" in page.PAGE.read_text()
