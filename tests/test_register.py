"""Patches that a user registers: run like ours in this process, found in a model in every other."""

from __future__ import annotations

import pickle
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hfpatch
from hfpatch import patches, testing
from hfpatch.errors import ConflictError, InputError, PatchFileError, RefusedError, UnknownPatchError
from hfpatch.patching import edits, registry, select
from hfpatch.patching.context import Context
from hfpatch.patching.language import Case, Needed, NotNeeded, Patch, Verdict
from hfpatch.patching.verifying.trial import Trial
from tests.fingerprint import fingerprint
from tests.processes import python

ROOT = Path(__file__).parent.parent
OURS = Path(patches.__path__[0]) / "shared" / "eps_alignment.py"


def condition(context: Context) -> Verdict:
    return Needed("it is a llama") if context.submodel is not None else NotNeeded("no submodel")


def symptom(trial: Trial) -> str | None:
    return None if "my_mark" in vars(trial.model) else "it has no mark"


MARK = Patch(
    title="A mark on a llama",
    architectures=("llama",),
    condition=condition,
    edits=(edits.set_attribute(select.submodel(), "my_mark", lambda _c, _t: 1, "set a mark"),),
    effect="exact",
    symptom=symptom,
    repros=(Case("llama"),),
    leaves_alone=(Case("gpt2"),),
)


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    yield
    for patch_id in registry.by_hand():
        hfpatch.unregister(patch_id)


def test_it_runs_like_ours(tiny: Any, capsys: Any) -> None:
    model = tiny("llama")
    before = fingerprint(model)
    assert hfpatch.register(MARK, id="my-mark") == "my-mark"
    assert "my-mark" in [entry.id for entry in hfpatch.list_patches()]
    assert "my-mark" in [entry.id for entry in hfpatch.list_patches("llama")]
    assert "my-mark" not in [entry.id for entry in hfpatch.list_patches("gpt2")]
    shown = " ".join(str(hfpatch.explain("my-mark")).split())
    assert shown.startswith("my-mark: A mark on a llama from registered by hand, ")
    assert __file__ in shown.replace(" ", "")  # a long path is broken
    assert hfpatch.explain("my-mark").to_dict()["origin"] == "registered by hand"
    fix = hfpatch.apply(model)  # a bare one: its effect is exact
    assert "hfpatch: my-mark (registered by hand) applied (exact): 1 edit" in capsys.readouterr().err
    assert model.my_mark == 1
    assert hfpatch.status(model).patches == ("my-mark",)
    assert "my-mark (registered by hand)" in str(hfpatch.status(model))
    assert hfpatch.apply(model, verbose=False).edits == ()
    fix.revert()
    assert fingerprint(model) == before
    assert hfpatch.apply(model, only="my-*", verbose=False).edits
    assert hfpatch.plan(tiny("gpt2"), only="my-mark").edits == ()


def test_prove_patch_takes_a_patch() -> None:
    alone = testing.prove_patch(MARK)
    assert alone.passed
    assert {r.patch for r in alone} == {"unregistered"}
    hfpatch.register(MARK, id="my-mark")
    assert {r.patch for r in testing.prove_patch(MARK)} == {"my-mark"}
    assert testing.prove_patch(registry.get("my-mark")) == testing.prove_patch(MARK)
    fails = replace(MARK, symptom=lambda trial: "always")
    assert [r.word for r in testing.prove_patch(fails)] == ["failed", "passed"]


def test_a_file_is_registered_by_its_name(tmp_path: Path, tiny: Any) -> None:
    file = tmp_path / "my_eps.py"
    file.write_text(OURS.read_text())
    assert hfpatch.register(file) == "my-eps"
    assert hfpatch.register(str(file), id="another") == "another"
    assert registry.get("my-eps").file == file.resolve()
    assert set(registry.get("my-eps").sections) >= {"What goes wrong", "Sources"}
    model = testing.SpeechLLM(tiny("gemma3_text"))
    made = hfpatch.apply(model, only="my-eps", verbose=False)
    assert made.edits[0].after == 1e-6
    with pytest.raises(ConflictError) as error:
        hfpatch.register(MARKED, id="rival")
        hfpatch.apply(model, only="rival")
    assert "my-eps wants 1e-06" in str(error.value)


MARKED = replace(
    MARK,
    architectures=("*",),
    whole=True,
    condition=lambda _context: Needed("always"),
    edits=(edits.set_attribute(select.loose_norms(), "eps", lambda _c, _t: 0.5, "set eps"),),
)


def test_after_unregister_the_model_still_has_it(tiny: Any) -> None:
    model = tiny("llama")
    before = fingerprint(model)
    hfpatch.register(MARK, id="my-mark")
    hfpatch.apply(model, only="my-mark", verbose=False)
    hfpatch.unregister("my-mark")
    with pytest.raises(UnknownPatchError, match="no patch is called 'my-mark'"):
        hfpatch.plan(model, only="my-mark")
    assert hfpatch.status(model).patches == ("my-mark",)
    hfpatch.verify(model, {"input_ids": torch.arange(8)[None]}, runs=["after"])
    with pytest.raises(UnknownPatchError):
        hfpatch.revert(model, only="my-marc")
    hfpatch.revert(model, exclude="my-*")
    assert hfpatch.status(model).patches == ("my-mark",)
    hfpatch.revert(model, only="my-mark")
    assert fingerprint(model) == before


@pytest.mark.thorough
def test_a_model_in_another_process_can_be_asked_and_reverted(tiny: Any, tmp_path: Path) -> None:
    model = tiny("llama")
    stock = {name: value.clone() for name, value in model.state_dict().items()}
    hfpatch.register(MARK, id="my-mark")
    hfpatch.apply(model, only="my-mark", verbose=False)
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(model))
    script = """
        import pickle, hfpatch
        model = pickle.load(open("model.pkl", "rb"))
        (edit,) = hfpatch.status(model).edits
        assert (edit.record.patch, edit.record.origin, edit.state.word) == ("my-mark", "registered by hand", "here")
        assert model.my_mark == 1
        hfpatch.revert(model)
        assert not hfpatch.status(model).edits and "my_mark" not in vars(model) and "_hfpatch" not in vars(model)
    """
    process(script, tmp_path)
    assert stock.keys() == model.state_dict().keys()


def process(script: str, folder: Path) -> str:
    """What a script prints in a new process, in a folder."""
    done = python("-c", textwrap.dedent(script), env={"PYTHONPATH": str(ROOT)}, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


BAD_FILES = {
    "syntax": ("PATCH = (\n", r"bad_file\.py:1: SyntaxError"),
    "name": ('"""Doc."""\n\nPATCH = nothing_of_that_name\n', r"bad_file\.py:3: NameError: name 'nothing_of_that_name'"),
    "leaves": ('"""Doc."""\nimport sys\nsys.exit(3)\n', r"bad_file\.py:3: SystemExit: 3"),
    "empty": ('"""Doc."""\n', r"bad_file\.py:1: the file defines no PATCH"),
    "not a Patch": ('"""Doc."""\nPATCH = 3\n', r"bad_file\.py:1: the file defines no PATCH"),
    "headings": (OURS.read_text().replace("## Numerics", "## Numbers"), r"bad_file\.py:1: docstring headings are"),
    "import": ('"""Doc."""\nimport not_there_at_all\n', r"bad_file\.py:2: ModuleNotFoundError"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_file_with_an_error_is_named_with_its_line_and_the_others_stay(kind: str, tmp_path: Path) -> None:
    text, sentence = BAD_FILES[kind]
    (tmp_path / "bad_file.py").write_text(text)
    before = registry.entries()
    with pytest.raises(PatchFileError, match=sentence):
        hfpatch.register(tmp_path / "bad_file.py")
    assert registry.entries() == before
    assert "hfpatch_registered_bad_file" not in sys.modules


def test_bad_input(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("PATCH")
    hfpatch.register(MARK, id="my-mark")
    bad: list[tuple[Any, dict[str, Any], str]] = [
        (tmp_path / "not_there.py", {}, "register: there is no file '.*not_there.py'; give a patch file"),
        (tmp_path, {}, "register: there is no file"),
        (MARK, {}, "a Patch has no name of its own; give id="),
        (
            MARK,
            {"id": "my-mark"},
            r"is that of a patch that is registered already; call hfpatch.unregister\('my-mark'\)",
        ),
        (MARK, {"id": "eps-alignment"}, "is that of a patch of hfpatch itself; give another id="),
        *((MARK, {"id": name}, "cannot be the id of a patch") for name in ("", "a b", "*", "suggested", "-a", "ä/b")),
        (3, {"id": "x"}, "register: want a Patch or the path of a patch file as patch=, got 3"),
        (MARK, {"id": 3}, "register: want a string or None as id=, got 3"),
        (OURS, {}, "the id 'eps-alignment' is that of a patch of hfpatch itself"),
    ]
    before = registry.entries()
    for given, words, sentence in bad:
        with pytest.raises(InputError, match=sentence):
            hfpatch.register(given, **words)
    with pytest.raises(PatchFileError, match=r"notes\.txt: Python cannot import it; want a file that ends in \.py"):
        hfpatch.register(tmp_path / "notes.txt")
    for name in ("not-there", "eps-alignment"):
        with pytest.raises(UnknownPatchError, match=f"unregister: no patch called '{name}' was registered by hand"):
            hfpatch.unregister(name)
    assert registry.entries() == before


def test_a_patch_file_on_the_command_line(tmp_path: Path, here: Any) -> None:
    (tmp_path / "my_eps.py").write_text(OURS.read_text())
    assert "5 of 5 cases passed" in here("verify", tmp_path / "my_eps.py").stdout
    hfpatch.unregister("my-eps")
    assert "there is no file" in here("verify", tmp_path / "not_there.py", code=2).sentence
    (tmp_path / "bad_file.py").write_text("PATCH = (\n")
    assert "bad_file.py:1: SyntaxError" in here("verify", tmp_path / "bad_file.py", code=2).sentence


def test_an_error_of_ones_own_keeps_its_traceback(tiny: Any) -> None:
    def wrong(context: Context) -> Verdict:
        return NotNeeded(context.no_such_fact)  # type: ignore[attr-defined]

    hfpatch.register(replace(MARK, condition=wrong), id="my-mark")
    with pytest.raises(AttributeError, match="no_such_fact") as error:
        hfpatch.plan(tiny("llama"))
    assert error.traceback[-1].name == "wrong"


def test_refused_by_name(tiny: Any) -> None:
    hfpatch.register(MARK, id="my-mark")
    with pytest.raises(RefusedError, match="my-mark was asked for and is refused: does not support gpt2"):
        hfpatch.apply(tiny("gpt2"), only="my-mark")
