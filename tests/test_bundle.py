"""Bundles on disk: whole or not there, bounded, and read without trust."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

from hfpatch.blackbox import BlackBox, folder, read_bundle
from hfpatch.blackbox.packing import pack, unpack
from hfpatch.errors import GuardStop, InputError
from hfpatch.guarding.guard import Guard

NAN = math.nan


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.out = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.out(x).square().mean()}


def guarded(box: BlackBox, width: int = 4, **options: Any) -> Guard:
    torch.manual_seed(0)
    model = Net(width)
    return Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), black_box=box, **{"verbose": False, **options})


def skip(guard: Guard, value: float = NAN, rows: int = 2) -> None:
    """A batch that is skipped."""
    width = guard.model.out.in_features
    assert guard.step(guard.model(x=torch.full((rows, width), value))["loss"]).skipped


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    guard = guarded(BlackBox(tmp_path / "box"))
    skip(guard)
    return tmp_path / "box" / "step-00000001-rank0"


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


class TestBounds:
    def test_the_first_and_the_newest_stay(self, tmp_path: Path) -> None:
        guard = guarded(BlackBox(tmp_path, max_bundles=3), max_skips=99, explode_at=1e-9)
        for _ in range(3):
            skip(guard)
        for value in (5.0, 6.0, 7.0):  # explosions: another reason
            skip(guard, value)
        assert [p.name for p in sorted(tmp_path.iterdir())] == [f"step-{n:08}-rank0" for n in (1, 5, 6)]
        skip(guard)
        assert not (tmp_path / "step-00000007-rank0").exists(), "this reason was recorded three times"

    def test_bytes(self, tmp_path: Path) -> None:
        guard = guarded(BlackBox(tmp_path, max_bytes=200_000), width=4096, max_skips=99)
        for _ in range(5):
            skip(guard, rows=4)  # 64 kB each
        names = [p.name for p in sorted(tmp_path.iterdir())]
        assert names[0] == "step-00000001-rank0"
        assert names[-1] == "step-00000005-rank0"
        assert sum(folder.size(p) for p in tmp_path.iterdir()) <= 200_000

    def test_a_batch_that_does_not_fit_is_left_out_and_that_is_said(self, tmp_path: Path) -> None:
        guard = guarded(BlackBox(tmp_path, max_bytes=30_000), width=4096)
        skip(guard)
        held = read_bundle(tmp_path / "step-00000001-rank0")
        assert held.about["batch"]["left_out"] == "its 32,768 bytes are more than the 30,000 left of max_bytes"
        assert held.finding is not None

    def test_what_others_keep_there_is_left_alone(self, tmp_path: Path, bundle: Path) -> None:
        box = bundle.parent
        other = box / "step-00000001-rank1"
        shutil.copytree(bundle, other)
        newer = box / "step-00000002-rank0"
        shutil.copytree(bundle, newer)
        about = json.loads((newer / "bundle.json").read_text())
        (newer / "bundle.json").write_text(json.dumps({**about, "format": 2}))
        (box / "step-00000003-rank0").mkdir()
        (box / "notes.txt").write_text("mine")
        before = contents(box)
        guard = guarded(BlackBox(box, max_bundles=1))
        skip(guard)
        after = contents(box)
        assert {k for k in before if k not in after} == {f"{bundle.name}/{f}" for f in ("bundle.json", folder.BATCH)}
        assert all(before[k] == v for k, v in after.items() if k in before)
        assert (box / "step-00000001-rank0-2").is_dir(), "nothing is written over"

    def test_leftovers_of_a_killed_process_go_once_they_are_old(self, tmp_path: Path) -> None:
        old, young = tmp_path / f"{folder.HIDDEN}old", tmp_path / f"{folder.HIDDEN}young"
        for path in (old, young):
            path.mkdir()
            (path / "batch.safetensors").write_bytes(b"half")
        os.utime(old, (time.time() - 3600,) * 2)
        skip(guarded(BlackBox(tmp_path)))
        assert sorted(p.name for p in tmp_path.iterdir()) == [young.name, "step-00000001-rank0"]

    @pytest.mark.parametrize("bound", [{"max_bundles": 0}, {"max_bytes": -1}, {"max_bundles": 2.5}])
    def test_bounds_that_are_none(self, bound: Any) -> None:
        with pytest.raises(InputError, match="want a positive integer"):
            BlackBox("box", **bound)


class TestADiskThatFails:
    def test_a_directory_that_cannot_be_made(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "file").write_text("")
        guard = guarded(BlackBox(tmp_path / "file" / "box"), max_skips=2)
        skip(guard)
        with pytest.raises(GuardStop) as stop:
            guard.step(guard.model(x=torch.full((2, 4), NAN))["loss"])
        (line,) = capsys.readouterr().err.splitlines()
        assert "cannot be written to (Not a directory); training continues without bundles" in line
        assert "bad-input" not in str(stop.value)
        assert "the caller passed it to the model" in str(stop.value), "the finding is told all the same"
        assert str(stop.value).splitlines()[-1].startswith("next: free disk space, or name another directory")

    def test_a_full_disk(
        self, bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = contents(bundle.parent)

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        guard = guarded(BlackBox(bundle.parent))
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            skip(guard)
            skip(guard)
        assert contents(bundle.parent) == before
        assert capsys.readouterr().err.count("No space left on device") == 1
        skip(guard)
        assert (bundle.parent / "step-00000003-rank0").is_dir()


CHILD = """
import importlib.util, sys
from pathlib import Path
# by its path: the package would import torch first
spec = importlib.util.spec_from_file_location("folder", sys.argv[1])
folder = importlib.util.module_from_spec(spec)
spec.loader.exec_module(folder)
box, data = Path(sys.argv[2]), bytes(1_600_000)
about = {"format": folder.FORMAT, "filler": "x" * 200_000, "batch": {"sha256": folder.sha256(data), "bytes": len(data)}}
for step in range(10**6):
    place = folder.write(box, f"step-{step:08}-rank0", about, data)
    folder.bound(box, 0, box / "step-00000000-rank0", 3, 2**30)
    if step == 0:
        print("ready", flush=True)
"""


@pytest.mark.slow
def test_sigkill_at_any_time_leaves_whole_bundles_only(tmp_path: Path) -> None:
    box = tmp_path / "box"
    met = 0
    for moment in np.random.default_rng(0).uniform(0, 0.05, size=25):
        command = [sys.executable, "-c", CHILD, str(folder.__file__), str(box)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            time.sleep(moment)
            child.kill()
        assert child.returncode == -signal.SIGKILL
        hidden = list(box.glob(f"{folder.HIDDEN}*"))
        met += bool(hidden)
        visible = [p for p in box.iterdir() if not p.name.startswith(".")]
        assert visible
        for path in visible:
            about = json.loads((path / "bundle.json").read_bytes())
            assert folder.digest({k: v for k, v in about.items() if k != "sha256"}) == about["sha256"]
            assert folder.sha256((path / folder.BATCH).read_bytes()) == about["batch"]["sha256"]
        for path in hidden:
            os.utime(path, (time.time() - 3600,) * 2)
    assert met > 0, "no kill met a writer"
    assert len(list(box.glob(f"{folder.HIDDEN}*"))) <= 2, "each child removed what those before it left"


def rewritten(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """bundle.json changed, with a digest that is right again: what only a hand could make."""

    def how(path: Path) -> None:
        about = json.loads((path / "bundle.json").read_text())
        del about["sha256"]
        change(about)
        (path / "bundle.json").write_text(json.dumps({**about, "sha256": folder.digest(about)}))

    return how


def edited(old: str, new: str) -> Callable[[Path], None]:
    def how(path: Path) -> None:
        text = (path / "bundle.json").read_text()
        assert old in text
        (path / "bundle.json").write_text(text.replace(old, new, 1))

    return how


def batch(change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    return lambda path: (path / folder.BATCH).write_bytes(change((path / folder.BATCH).read_bytes()))


def replaced_batch(path: Path) -> None:
    """Another safetensors file, with a digest that is right: the description does not go with it."""
    data = save({"y": torch.ones(1)})
    (path / folder.BATCH).write_bytes(data)
    rewritten(lambda a: a.update(batch={"sha256": folder.sha256(data), "bytes": len(data)}))(path)


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another format": (
        edited('"format": 1', '"format": 2'),
        "has format 2, written by hfpatch .*this version reads format 1",
    ),
    "an edited figure": (edited('"step": 1', '"step": 7'), "was changed after it was written: its digest differs"),
    "truncated JSON": (
        lambda p: (p / "bundle.json").write_bytes((p / "bundle.json").read_bytes()[:500]),
        "bundle.json: it is not valid JSON .*truncated or changed",
    ),
    "empty JSON": (lambda p: (p / "bundle.json").write_bytes(b""), "it is empty"),
    "a pickle": (lambda p: (p / "bundle.json").write_bytes(b"\x80\x04N."), "is not text"),
    "a list": (lambda p: (p / "bundle.json").write_text("[]"), "want a JSON object, got list"),
    "deep nesting": (lambda p: (p / "bundle.json").write_text("[" * 100_000), "nested too deep"),
    "no JSON": (lambda p: (p / "bundle.json").unlink(), "it holds no bundle.json"),
    "no batch": (lambda p: (p / folder.BATCH).unlink(), "batch.safetensors cannot be read: No such file"),
    "truncated batch": (batch(lambda b: b[:-8]), "batch.safetensors has .* bytes, .* were written"),
    "one bit of the batch": (
        batch(lambda b: b[:-1] + bytes([b[-1] ^ 1])),
        "batch.safetensors was changed after it was written",
    ),
    "no directory": (shutil.rmtree, "no such directory; name a bundle"),
    "a key is missing": (rewritten(lambda a: a.pop("replay")), "is malformed .KeyError"),
    "a finding of another type": (
        rewritten(lambda a: a["replay"]["finding"].update(module=[])),
        "is malformed .TypeError",
    ),
    "a step in words": (rewritten(lambda a: a.update(step="one")), "is malformed .TypeError"),
    "an empty finding": (
        rewritten(lambda a: a["replay"].update(finding={})),
        "is malformed .KeyError",
    ),
    "a batch without its call": (rewritten(lambda a: a.update(call=None)), "is malformed .TypeError"),
    "a batch without its size": (
        rewritten(lambda a: a["batch"].pop("bytes")),
        "is malformed .KeyError",
    ),
    "a batch whose size is a word": (
        rewritten(lambda a: a["batch"].update(bytes="x")),
        "is malformed .TypeError",
    ),
    "no reason": (rewritten(lambda a: a.update(batch={})), "is malformed .KeyError"),
}

UNRUNNABLE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an odd kind": (rewritten(lambda a: a["arguments"]["kwargs"].update({"is": "code"})), "described as 'code'"),
    "another batch": (replaced_batch, "is malformed .KeyError: 'kwargs.x'"),
    "random numbers that are none": (
        rewritten(lambda a: a["call"]["random"]["numpy"].__setitem__(1, "%%%")),
        "is malformed",
    ),
    "a factor in words": (rewritten(lambda a: a["replay"].update(factor="much")), "is malformed"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_bundle_that_is_not_as_it_was_is_one_sentence(kind: str, bundle: Path) -> None:
    how, sentence = BROKEN[kind]
    how(bundle)
    before = contents(bundle.parent)
    with pytest.raises(InputError, match=sentence) as error:
        read_bundle(bundle)
    assert "\n" not in str(error.value)
    assert contents(bundle.parent) == before


@pytest.mark.parametrize("kind", UNRUNNABLE)
def test_a_forged_bundle_is_one_sentence_when_it_is_run(kind: str, bundle: Path) -> None:
    how, sentence = UNRUNNABLE[kind]
    how(bundle)
    with pytest.raises(InputError, match=sentence):
        read_bundle(bundle).replay(Net())


def test_the_directory_of_bundles_is_told_from_a_bundle(bundle: Path) -> None:
    with pytest.raises(InputError, match=f"name a bundle in it, such as {bundle.name}"):
        read_bundle(bundle.parent)


def test_no_pickle_is_written(bundle: Path) -> None:
    assert sorted(p.name for p in bundle.iterdir()) == ["batch.safetensors", "bundle.json"]
    json.loads((bundle / "bundle.json").read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
TENSORS = st.builds(
    lambda dtype, shape, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 9),
)
PLAIN = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False) | st.sampled_from(DTYPES)
VALUES = st.recursive(
    TENSORS | PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=6,
)


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(alike(v, b[k]) for k, v in a.items())
    return type(a) is type(b) and a == b


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(VALUES)
def test_arguments_come_back_as_they_were(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    described = json.loads(json.dumps(pack(value, "kwargs", tensors), allow_nan=False))
    held = {name: t.clone() for name, t in tensors.items()}
    assert alike(value, unpack(described, held, torch.device("cpu"), "kwargs"))
