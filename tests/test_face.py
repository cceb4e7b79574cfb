"""The public face: one list of names, one way in which results are shown, stable codes, and old spellings."""

from __future__ import annotations

import ast
import copy
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfpatch
from hfpatch import codes, deprecated, errors, testing
from hfpatch.atlas.atlas import Atlas, Row
from hfpatch.guarding.outcome import Reason
from hfpatch.lab.tiny import rescale, tiny_model
from hfpatch.patching import registry
from hfpatch.report import Sheet, Shown
from hfpatch.report.sheet import CODE

ROOT = Path(__file__).parent.parent
WIDTHS = (60, 80, 100, 200)
BATCH = {"input_ids": (torch.arange(24).reshape(2, 12) * 7 + 3) % 64}


def overflowing() -> Any:
    model = tiny_model("gemma3_text")
    rescale(model, {}, {"*post_feedforward_layernorm.weight": 24000.0})
    return model.half()


def skipped_step(folder: Path) -> Any:
    model = overflowing().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = hfpatch.Guard(model, optimizer, verbose=False, black_box=hfpatch.BlackBox(folder))
    loss = model(**BATCH, labels=BATCH["input_ids"]).loss
    return guard.step(loss * torch.nan)


def results(folder: Path) -> dict[str, Any]:
    """A real object of each type that a public function returns."""
    from safetensors.torch import save_file

    model = overflowing()
    fix = hfpatch.apply(model, verbose=False)
    proof = fix.verify(BATCH, runs=["before", "after"])
    with hfpatch.trace(overflowing()) as traced, torch.no_grad():
        traced.model(**BATCH)
    trained = tiny_model("llama")
    with hfpatch.trace(trained) as healthy:
        trained(**BATCH, labels=BATCH["input_ids"]).loss.backward()
    save_file({"a.weight": torch.tensor([1.0, torch.nan, 70000.0])}, folder / "model.safetensors")
    outcome = skipped_step(folder / "box")
    (bundle,) = map(hfpatch.read_bundle, (folder / "box").iterdir())
    return {
        "Plan": hfpatch.plan(model),
        "Applied": fix,
        "Status": hfpatch.status(model),
        "Proof": proof,
        "Catalogue": hfpatch.list_patches(),
        "Explanation": hfpatch.explain("eps-alignment"),
        "ModelInfo": hfpatch.inspect(model),
        "LoraTargets": hfpatch.lora_targets(model),
        "Trace": traced,
        "Finding": traced.first_bad,
        "Headroom": healthy.headroom("float16"),
        "LargestGradients": healthy.largest_gradients(),
        "Sheet": traced.report(),
        "ScanReport": hfpatch.scan(str(folder)),
        "Hazards": hfpatch.check(model, {"fp16": True, "max_grad_norm": 0}),
        "Outcome": outcome,
        "GradientReport": hfpatch.gradient_report(trained),
        "Bundle": bundle,
        "Rerun": bundle.replay(overflowing().float()),
        "Diagnosis": hfpatch.doctor(tiny_model("llama", num_hidden_layers=1), batch=BATCH),
        "Comparison": hfpatch.compare(trained, copy.deepcopy(trained), BATCH),
    }


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results(tmp_path_factory.mktemp("face"))


def exported() -> set[str]:
    found = {n: getattr(hfpatch, n) for n in hfpatch.__all__}
    return {n for n, thing in found.items() if isinstance(thing, type) and issubclass(thing, Shown)}


def every_class(of: type) -> Iterable[type]:
    for each in of.__subclasses__():
        yield each
        yield from every_class(each)


# how results are shown


def test_every_result_is_exported(shown: dict[str, Any]) -> None:
    assert shown.keys() == exported()
    for name, thing in shown.items():
        assert type(thing) is getattr(hfpatch, name)


def test_results_print_as_their_tables(shown: dict[str, Any]) -> None:
    for name, thing in shown.items():
        text = "\n\n".join(s.to_text() for s in thing.sheets())
        assert str(thing) == repr(thing) == text, name
        assert isinstance(thing.sheet(), Sheet), name
        assert thing.sheet().to_text() in text, name
        assert 0 < len(text.splitlines()) < 200, name
        assert thing._repr_html_().startswith("<div>"), name


def test_a_notebook_shows_first_what_is_done(shown: dict[str, Any]) -> None:
    for name in ("Plan", "Applied"):
        first, rest = shown[name]._repr_html_().split("<details>")
        assert ">applied<" in first or ">not needed<" in rest, name
        assert ">applied<" not in rest, name
        for decided in ("opt-in", "refused"):
            assert f">{decided}<" not in first, name
    first, rest = shown["Trace"]._repr_html_().split("<details>", 1)
    assert ">starts here<" in first
    assert "model.layers.0<" not in first
    assert "model.layers.0<" in rest
    first, rest = shown["Finding"]._repr_html_().split("<details>")
    assert "exceeds float16" in first
    assert "<table>" not in first
    assert "<table>" in rest


def test_folding_hides_no_row() -> None:
    rows = tuple((str(i),) for i in range(4))
    for folded, words in ((set(), None), ({1, 2}, "2 more rows"), ({3}, "1 more row"), ({0, 1, 2, 3}, "4 rows")):
        sheet = Sheet("t", ("c",), rows, folded=frozenset(folded))
        page = sheet._repr_html_()
        assert [page.count(f">{i}</td>") for i in range(4)] == [1] * 4
        assert (f"<summary>{words}</summary>" in page) == (words is not None)
        assert sheet.to_text() == Sheet("t", ("c",), rows).to_text()


def test_a_table_without_rows_has_no_heading_either() -> None:
    sheet = Sheet("no hazards", ("hazard", "why"), (), notes=("read: dtypes",))
    assert "hazard<" not in sheet._repr_html_()
    assert "read: dtypes" in sheet._repr_html_()


def test_lines_in_a_notebook_are_no_red_boxes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hfpatch.apply(overflowing())
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("hfpatch: fp16-residual-overflow applied")
    stream = type("OutStream", (), {"__module__": "ipykernel.iostream"})
    monkeypatch.setattr(sys, "stderr", stream())
    hfpatch.apply(overflowing())
    assert capsys.readouterr().out == told.err


def test_results_are_json(shown: dict[str, Any]) -> None:
    for name, thing in shown.items():
        found = thing.to_dict()
        assert found, name
        assert json.loads(json.dumps(found, allow_nan=False)) is not None, name


def test_no_class_prints_in_a_way_of_its_own() -> None:
    mine = [c for c in every_class(Shown) if c.__module__.startswith("hfpatch.")]
    assert len(mine) > 20
    for each in mine:
        html = () if each is hfpatch.Trace else ("_repr_html_",)  # it shows its picture
        for method in ("__str__", "__repr__", *html):
            assert getattr(each, method) is getattr(Shown, method), f"{each.__name__}.{method}"


def test_results_of_cases_and_the_atlas() -> None:
    cases = testing.prove_patch(registry.get("embed-token-resolver"))
    assert isinstance(cases, list)
    assert isinstance(cases, testing.CaseResults)
    assert cases.to_dict()["passed"]
    assert str(cases).startswith(f"{len(cases)} of {len(cases)} cases passed")
    atlas = Atlas({"transformers": "5"}, (Row("gone", ("causal",), None, "it does not build"),))
    assert str(atlas) == repr(atlas)
    assert json.loads(json.dumps(atlas.to_dict()))["architectures"]["gone"]["reason"] == "it does not build"


def test_what_prints_a_trace_ends_no_step() -> None:
    model = tiny_model("llama")
    with hfpatch.trace(model) as t, torch.no_grad():
        handle = model.model.layers[0].register_forward_hook(lambda *_: str(t) and None)
        model(**BATCH)
        handle.remove()
    assert len(t.steps) == 1
    assert any("layers.1" in e.module for e in t.steps[0].events)


@pytest.mark.parametrize("width", WIDTHS)
def test_code_in_a_table_is_never_broken(shown: dict[str, Any], width: int) -> None:
    for name, thing in shown.items():
        for sheet in thing.sheets():
            words = sheet.to_text(width).split()
            cells = [sheet.title, *sheet.notes, *sheet.columns, *(c for row in sheet.rows for c in row)]
            broken = [w for cell in cells for w in cell.split() if CODE.search(w) and w not in words]
            assert not broken, (name, width, broken[:3])


# the list of names


def test_there_is_one_list() -> None:
    tree = ast.parse((ROOT / "hfpatch" / "__init__.pyi").read_text())
    names = [alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(names) == sorted(set(names))
    assert set(names) == set(hfpatch.__all__) - {"__version__"} == set(dir(hfpatch))
    star: dict[str, Any] = {}
    exec("from hfpatch import *", star)  # noqa: S102
    assert set(hfpatch.__all__) <= star.keys()
    with pytest.raises(AttributeError):
        _ = hfpatch.nothing  # type: ignore[attr-defined]


def test_modules_are_there_without_an_import_and_torch_is_not() -> None:
    script = (
        "import sys, hfpatch; hfpatch.errors.InputError; hfpatch.list_patches(); hfpatch.__version__; dir(hfpatch)\n"
        "assert not {'torch', 'transformers', 'peft', 'numpy'} & set(sys.modules)\n"
        "hfpatch.nn.BoundedModulation; hfpatch.testing.tiny_model\n"
        "from hfpatch.cli import app\n"
    )
    version = (
        "import sys; from hfpatch.cli import app\n"
        "try: app(['--version'])\n"
        "except SystemExit as done: assert not done.code and 'torch' not in sys.modules\n"
    )
    run(script)
    assert run(version) == f"hfpatch {hfpatch.__version__}\n"


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


# codes


def test_every_error_has_a_code_of_the_list() -> None:
    classes = [errors.HfpatchError, *every_class(errors.HfpatchError)]
    mine = [c for c in classes if c.__module__ == "hfpatch.errors"]
    found = [c.code for c in mine]
    assert sorted(found) == sorted(codes.ERRORS)
    for each in mine:
        assert each.__name__ in str(errors.__doc__)
    with pytest.raises(errors.UnknownPatchError) as error:
        hfpatch.explain("nothing")
    assert error.value.code == "unknown-patch"


def test_every_decision_has_a_code_of_the_list(shown: dict[str, Any]) -> None:
    assert tuple(codes.DECISIONS) == codes.DECISION_CODES
    source = "".join(p.read_text() for p in (ROOT / "hfpatch" / "patching").rglob("*.py"))
    for code in codes.DECISIONS:
        assert f'"{code}"' in source, f"{code} is given nowhere"
    for decision in shown["Plan"].to_dict()["decisions"]:
        assert decision["code"] in codes.DECISIONS
    with pytest.raises(ValueError, match=r"code 'because': want one of needed, "):
        hfpatch.patching.decision.Decision("p", None, "refused", "why", code="because")  # type: ignore


def test_codes_of_decisions() -> None:
    model = overflowing()
    fp16 = "fp16-residual-overflow"

    def code(patch: str, **words: Any) -> set[str]:
        return {d.code for d in hfpatch.plan(model, **words).decisions if d.patch == patch}

    assert code(fp16) == {"needed"}
    assert code(fp16, exclude=fp16) == {"excluded"}
    assert code("lora-target-expansion") == {"refused-here"}
    assert code("projection-init") == {"no-symptom-possible"}
    hfpatch.apply(model, only=fp16, verbose=False)
    assert code(fp16) == {"already-applied"}
    model = nn.Linear(2, 2)
    assert code(fp16) == {"not-served"}


def test_every_hazard_and_skip_has_a_code_of_the_list(shown: dict[str, Any]) -> None:
    given: set[str] = set()
    for file in (ROOT / "hfpatch" / "guarding").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Hazard":
                given.add(ast.literal_eval(node.args[0]))
    assert given == codes.HAZARDS.keys()
    assert "clipping-off" in shown["Hazards"].ids
    assert [r.code for r in Reason] == list(codes.SKIPS)
    assert shown["Outcome"].code == shown["Outcome"].to_dict()["code"] == "loss"


# old spellings


@pytest.fixture
def unwarned() -> Iterable[None]:
    deprecated.warn.cache_clear()
    yield
    deprecated.warn.cache_clear()


def told(call: Callable[[], Any]) -> list[str]:
    """What a call warns of, with the file that the warning points at."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    assert all(w.category is FutureWarning and w.filename == __file__ for w in seen)
    return [str(w.message) for w in seen]


def test_old_names_of_arguments_work_and_warn_once(unwarned: None) -> None:
    loss: Any = torch.tensor(1.5)
    old: Any = hfpatch.validate_loss
    (sentence,) = told(lambda: old(loss, min=0.0))
    assert sentence.startswith("validate_loss: min= is now low=: the old names are those of Python's own functions")
    assert told(lambda: old(loss, min=0.0)) == []
    assert len(told(lambda: old(loss, max=2.0))) == 1
    with pytest.raises(errors.InputError, match=r"outside 0 to 1;"):
        old(loss, min=0, max=1)
    with pytest.raises(TypeError, match="min= and low= are the same; give low="):
        old(loss, min=0, low=0)
    assert told(lambda: hfpatch.validate_loss(loss, low=0.0, high=2.0)) == []


def test_options_of_a_guard_by_position_work_and_warn_once(unwarned: None) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    old: Any = hfpatch.Guard
    made: list[Any] = []
    (sentence,) = told(lambda: made.append(old(model, optimizer, None, None, None, 0.5)))
    assert sentence.startswith("Guard: give scaler=, accelerator=, max_grad_norm= by name: ")
    assert made[0].max_grad_norm == 0.5
    assert told(lambda: old(model, optimizer, None, None, None, 0.5)) == []
    assert told(lambda: hfpatch.Guard(model, optimizer, None, max_grad_norm=0.5)) == []
    with pytest.raises(TypeError, match="scaler is given twice"):
        old(model, optimizer, None, None, scaler=None)


def test_old_names_of_methods(shown: dict[str, Any], unwarned: None) -> None:
    for name in ("Headroom", "ScanReport"):
        sheets: list[Any] = []
        assert len(told(lambda n=name, s=sheets: s.append(shown[n].to_sheet()))) == 1
        assert sheets == [shown[name].sheet()]
