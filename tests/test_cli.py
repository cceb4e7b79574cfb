"""The command line, in this process; and as processes of its own where that is what a test is about."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from hfpatch import patches
from hfpatch.cli import main
from hfpatch.lab.tiny import tiny_config
from hfpatch.patching import registry
from tests.conftest import Ran


def process(*words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The command line as a process of its own, which imports torch anew."""
    environment = {**os.environ, "COLUMNS": "80", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **env}
    command = [sys.executable, "-m", "hfpatch.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def hfpatch(*words: str | Path, columns: int = 80) -> Ran:
    """The command line in this process."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        patch.setenv("COLUMNS", str(columns))
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(sys, "argv", ["hfpatch", *map(str, words)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return Ran(code, out.getvalue(), err.getvalue())


def good(*words: str | Path, **more: Any) -> str:
    done = hfpatch(*words, **more)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def bad(*words: str | Path) -> str:
    done = hfpatch(*words)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("hfpatch: ")
    return lines[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a config only: weights are never needed."""
    folder = tmp_path_factory.mktemp("gemma")
    config = tiny_config("gemma3_text", dtype="float16")
    config.architectures = ["Gemma3ForCausalLM"]
    config.save_pretrained(folder)
    return folder


def test_a_process_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    """What is printed, and how it ends, is as in this process."""
    for words in (["plan", checkpoint, "--json"], ["plan", tmp_path / "not-there"], ["plan"], ["explain", "eps"]):
        there, here = process(*words), hfpatch(*words)
        assert (there.returncode, there.stdout) == (here.returncode, here.stdout)
        assert there.stderr.splitlines()[-1:] == here.stderr.splitlines()[-1:]
        assert len(there.stderr.splitlines()) == len(here.stderr.splitlines())


@pytest.mark.slow
def test_help_list_and_explain_import_no_torch() -> None:
    for words in (["--help"], ["list"], ["explain", "eps-alignment"], ["list", "--json"], ["inspect", "--help"]):
        script = (
            f"import sys; sys.argv = ['hfpatch', *{words!r}]\n"
            "from hfpatch.cli import main\n"
            "try: main()\n"
            "except SystemExit as end: assert not end.code, end.code\n"
            "assert not {'torch', 'transformers', 'peft', 'numpy'} & set(sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_list(checkpoint: Path) -> None:
    ids = sorted(registry.entries())
    assert [p["id"] for p in json.loads(good("list", "--json"))["patches"]] == ids
    text = good("list")
    assert all(i in text for i in ids)
    assert max(map(len, text.splitlines())) <= 80
    assert "fp16-residual-overflow" not in good("list", "--architecture", "bert")


@pytest.mark.parametrize("patch", sorted(registry.entries()))
def test_explain(patch: str) -> None:
    text = good("explain", patch)
    assert all(h in text for h in ("What goes wrong", "Numerics", "Known limits", "Sources"))
    assert max(map(len, text.splitlines())) <= 80
    shown = json.loads(good("explain", patch, "--json"))
    assert shown["id"] == patch
    assert set(shown["sections"]) >= {"What goes wrong", "Numerics"}


def test_inspect(checkpoint: Path) -> None:
    for model in (checkpoint, checkpoint / "config.json"):
        text = good("inspect", model)
        assert max(map(len, text.splitlines())) <= 80, text
        for word in ("gemma3_text", "Gemma3ForCausalLM", "model.embed_tokens", "rms_norm_eps", "float16"):
            assert word in text, word
    shown = json.loads(good("inspect", checkpoint, "--json"))
    assert shown["architecture"] == "gemma3_text"
    decisions = {d["patch"]: d["decision"] for d in shown["plan"]["decisions"]}
    assert decisions["fp16-residual-overflow"] == "applied"


def test_plan(checkpoint: Path) -> None:
    text = good("plan", checkpoint)
    assert "the weights are not loaded" in text
    assert max(map(len, text.splitlines())) <= 80
    shown = json.loads(good("plan", checkpoint, "--json", "--only", "fp16-residual-*"))
    assert set(shown) == {"model", "decisions", "unknown"}
    (decision,) = shown["decisions"]
    assert decision["decision"] == "applied"
    assert len(decision["edits"]) == 18
    shown = json.loads(
        good(
            "plan", checkpoint, "--json", "--compute-dtype", "bfloat16", "--only", "fp16-residual-*", "--only", "eps-*"
        )
    )
    assert [d["decision"] for d in shown["decisions"]] == ["not needed"] * 2


def test_demo() -> None:
    text = good("demo")
    assert "status(model)" in text
    shown = json.loads(good("demo", "--json"))
    before, after = shown["proof"]["rows"][:2]
    assert (before["finite"], after["finite"]) == (False, True)
    assert shown["status_after_revert"]["patches"] == []


def test_verify(tmp_path: Path) -> None:
    text = good("verify", "eps-alignment")
    assert "5 of 5 cases passed" in text
    shown = json.loads(good("verify", "embed-*", "--json"))
    assert shown["passed"]
    assert {c["kind"] for c in shown["cases"]} == {"repro", "left alone"}


def offered(folder: Path, name: str, text: str) -> str:
    """An installed package that offers a patch. Returns the path it is found on."""
    (folder / f"{name.replace('-', '_')}.py").write_text(text)
    info = folder / "x-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: x\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[hfpatch.patches]\n{name} = {name.replace('-', '_')}\n")
    return str(folder)


def test_verify_fails_with_exit_1(tmp_path: Path) -> None:
    """A patch from another package whose repro it does not cure."""
    source = registry.get("eps-alignment").file.read_text()
    cures_nothing = source.replace("value=lambda context, _target: backbone_eps(context)", "value=lambda _c, _t: 0.5")
    done = process("verify", "cures-nothing", PYTHONPATH=offered(tmp_path, "cures-nothing", cures_nothing))
    assert done.returncode == 1, done.stderr
    assert "failed" in done.stdout
    assert "0.5" in done.stdout


@pytest.mark.thorough
def test_a_broken_file_of_a_package_is_named_where_it_is_asked_for(tmp_path: Path, checkpoint: Path) -> None:
    path = offered(tmp_path, "broken-one", "PATCH = (\n")
    done = process("list", PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "broken-one" in done.stdout
    assert "eps-alignment" in done.stdout
    done = process("explain", "broken-one", PYTHONPATH=path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("hfpatch: broken-one of x 1: ")
    assert line.endswith("broken_one.py:1: SyntaxError: '(' was never closed")
    done = process("plan", checkpoint, "--include", "broken-one", "--json", PYTHONPATH=path)
    (row,) = (d for d in json.loads(done.stdout)["decisions"] if d["patch"] == "broken-one")
    assert (done.returncode, row["decision"], row["code"], row["origin"]) == (0, "refused", "patch-raised", "x 1")
    assert "broken_one.py:1: SyntaxError" in row["reason"]
    assert "broken-one (x 1)" in " ".join(process("plan", checkpoint, PYTHONPATH=path).stdout.split())


def test_a_broken_file_of_ours_is_named_and_the_others_listed(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_one.py").write_text("PATCH = (\n")
    monkeypatch.setattr(patches, "__path__", [*patches.__path__, str(tmp_path)])
    registry._discover.cache_clear()
    try:
        listed, planned = hfpatch("list"), hfpatch("plan", checkpoint)
    finally:
        registry._discover.cache_clear()
    assert listed.returncode == 2
    assert "broken_one.py:1: SyntaxError" in listed.stderr
    assert "eps-alignment" in listed.stdout
    assert planned.returncode == 0
    assert "broken_one.py:1: SyntaxError" in planned.stderr


@pytest.mark.parametrize("verb", ["inspect", "plan"])
def test_bad_models(verb: str, tmp_path: Path) -> None:
    """One sentence, exit 2; the full list of bad inputs is in test_source."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.json").write_text('{"model_type": "llam')
    (tmp_path / "odd.json").write_text('{"model_type": "lama"}')
    (tmp_path / "huge.json").write_text('{"model_type": "llama", "num_hidden_layers": 1000000000}')
    for model in ("empty", "cut.json", "odd.json", "huge.json", "not-there"):
        bad(verb, tmp_path / model)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cut.json", "empty", "huge.json", "odd.json"]


def test_bad_names(checkpoint: Path) -> None:
    assert "did you mean eps-alignment" in bad("explain", "eps-aligment")
    assert "did you mean" in bad("verify", "eps-aligment")
    assert "did you mean" in bad("plan", checkpoint, "--only", "eps-aligment")
    assert "want float16, bfloat16" in bad("plan", checkpoint, "--compute-dtype", "int3")
    done = hfpatch("plan")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_help_is_one_screen(here: Any) -> None:
    ran = here("--help")
    assert len(ran.stdout.splitlines()) < 30
    assert max(map(len, ran.stdout.splitlines())) <= 80
    assert "compare" in ran.stdout
