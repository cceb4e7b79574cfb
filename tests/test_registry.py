"""Discovery: our patch files, a broken one, one whose id is taken. Those of other packages: test_installed.py."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hfpatch
from hfpatch import patches
from hfpatch.errors import PatchFileError, UnknownPatchError
from hfpatch.patching import catalogue, registry

CARD = {  # at least
    "cudnn-attention-backward-nan",
    "eager-attention",
    "embed-token-resolver",
    "eps-alignment",
    "fp16-residual-overflow",
    "fp32-attention-logits",
    "lora-target-expansion",
    "projection-init",
    "sigmoid-modulation",
    "wo-overflow",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A `patches/` folder of our own, searched after the real one."""
    monkeypatch.setattr(patches, "__path__", [*patches.__path__, str(tmp_path)])
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith("hfpatch.patches.") and "broken" in n]:
        del sys.modules[name]


def read_anew(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The registry as a process that begins now reads it; what explains a patch asks this one."""
    spec = importlib.util.find_spec(registry.__name__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, registry.__name__, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(catalogue, "registry", module)
    return module


GOOD = (Path(patches.__path__[0]) / "shared" / "eps_alignment.py").read_text()


@pytest.mark.parametrize(
    ("name", "text", "line", "word"),
    [
        ("broken_syntax", "PATCH = (\n", 1, "SyntaxError"),
        ("broken_name", '"""Doc."""\n\nPATCH = nothing_of_that_name\n', 3, "NameError"),
        ("broken_leaves", '"""Doc."""\nimport sys\n\nsys.exit(3)\n', 4, "SystemExit: 3"),
        ("broken_empty", '"""Doc."""\n', 1, "no PATCH"),
        ("broken_headings", GOOD.replace("## Numerics", "## Numbers"), 1, "headings"),
        ("broken_effect", GOOD.replace("effect=effect", 'effect="harmless"'), None, "harmless"),
        ("broken_cases", GOOD.replace("repros=(", "repros=() and ("), None, "at least one case of each"),
    ],
)
def test_a_broken_file_is_named_with_its_line_and_the_others_load(
    folder: Path, name: str, text: str, line: int | None, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / f"{name}.py").write_text(text)
    with pytest.warns(UserWarning, match=word):
        assert set(read_anew(monkeypatch).entries()) >= CARD
    with pytest.raises(PatchFileError, match=rf"{name}\.py:{line or '[0-9]+'}: ?.*{word}"):
        hfpatch.explain(name.replace("_", "-"))


def test_an_id_that_is_taken_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "eps_alignment.py").write_text(GOOD)
    anew = read_anew(monkeypatch)
    with pytest.warns(UserWarning, match="taken by"):
        assert anew.entries()["eps-alignment"].file.parent != folder
    assert "taken by" in str(anew.broken()["eps-alignment"])


def test_unknown_names_list_near_ones() -> None:
    with pytest.raises(UnknownPatchError, match="did you mean eps-alignment"):
        hfpatch.explain("eps-aligment")
    with pytest.raises(UnknownPatchError, match="there are: "):
        registry.match("zzz*")


def test_list_by_architecture() -> None:
    def listed(architecture: str) -> set[str]:
        return CARD & {e.id for e in hfpatch.list_patches(architecture)}

    assert listed("llama") == CARD - {"wo-overflow"}
    assert listed("t5") == CARD - {"fp16-residual-overflow"}
    assert listed("bert") == CARD - {"fp16-residual-overflow", "wo-overflow"}
    assert [e.id for e in hfpatch.list_patches()] == sorted(registry.entries())


def test_patch_files_write_to_nothing() -> None:
    """Only the engine writes: no assignment to an attribute, no setattr, no register_ in a patch file."""
    import ast

    for entry in registry.entries().values():
        tree = ast.parse(entry.file.read_text())
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            assert not any(isinstance(t, ast.Attribute) for t in targets), entry.file
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                assert not name.startswith(("setattr", "register_")), entry.file
        assert len(entry.file.read_text().splitlines()) <= 200, entry.file


def test_public_face() -> None:
    import types

    for name in hfpatch.__all__:
        assert getattr(hfpatch, name) is not None
    packages = {p.stem for p in Path(hfpatch.__file__).parent.iterdir()}
    functions = {n for n in hfpatch.__all__ if isinstance(getattr(hfpatch, n), types.FunctionType)}
    assert not packages & functions
