"""Nothing of a checkpoint, a bundle or a file of arguments is run, imported or downloaded, and no reader hangs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import nullcontext
from pathlib import Path
from types import FrameType

import pytest
import torch
from transformers import integrations
from transformers.utils import import_utils

import hfpatch
from hfpatch.blackbox import folder, read_bundle
from hfpatch.cli.common import CHARACTERS, read_text
from hfpatch.errors import InputError
from hfpatch.guarding.checking.settings import read_settings, settings_file
from hfpatch.lab.tiny import tiny_config
from hfpatch.model.source import build_on_meta, load_config
from hfpatch.scanning.scan import scan
from hfpatch.tracing.checkpoint import load_model
from hfpatch.untrusted.ordinary import read_ordinary
from tests.conftest import ROOT, Ran
from tests.hostile import doors, fuzz, process, traps
from tests.test_replay_cli import poisoned, skipped
from tests.test_trace_cli import save, tiny

SECONDS = 60
FROM_A_CONFIG = ("inspect", "plan", "check")
WITH_WEIGHTS: dict[str, tuple[str, ...]] = {
    "trace": ("MODEL", "--device", "cpu"), "verify": ("MODEL",), "doctor": ("MODEL", "--device", "cpu"),
    "plan": ("MODEL", "--text", "README.md"), "compare": ("MODEL", "HEALTHY"), "scan": ("MODEL",),
    "replay": ("BUNDLE", "--model", "MODEL", "--device", "cpu"),
}  # fmt: skip
"""The words of a command, where those in capitals stand for folders."""
Here = Callable[..., Ran]


@pytest.fixture(autouse=True)
def limit() -> Generator[None]:
    """A reader that waits for ever fails the test."""

    def end(_: int, __: FrameType | None) -> None:
        raise TimeoutError(f"a test took more than {SECONDS} s")

    was = signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, was)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny(), tmp_path_factory.mktemp("healthy") / "model")


@pytest.fixture
def model(healthy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(healthy, tmp_path / "model"))


@pytest.fixture
def sprung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Callable[[], list[str]]]:
    """Arm the traps, with a `kernels` package that could be asked; `sprung()` says which were."""
    asked: list[str] = []

    def get_kernel(*words: object, **_: object) -> None:
        asked.append(f"kernels asked for {words}")
        raise ValueError("kernels was asked")

    modeling = sys.modules["transformers.modeling_utils"]
    for module in (integrations.hub_kernels, modeling, import_utils, sys.modules["transformers.utils"]):
        monkeypatch.setattr(module, "is_kernels_available", lambda: True)
    monkeypatch.setattr(integrations.hub_kernels, "get_kernel", get_kernel)
    monkeypatch.syspath_prepend(traps.install(tmp_path / "site"))
    monkeypatch.chdir(ROOT)
    with traps.armed(tmp_path / "notes") as notes:
        yield lambda: [*notes, *asked, *(tmp_path / "notes").read_text().splitlines()]


def told(here: Here, *words: object) -> str:
    """The sentence that a command ends with; 0 and 1 are right too where nothing had to be refused."""
    for code in (2, 0, 1):
        try:
            ran = here(*words, code=code)
        except AssertionError:
            if code == 1:
                raise
            continue
        return ran.sentence if code == 2 else ""
    raise AssertionError


INNOCENT = ("code of its own for a known model",)
"""Doors that nobody goes through: transformers has a class of its own for the model."""


@pytest.mark.parametrize("door", doors.MODEL)
def test_a_config_has_nothing_run(door: str, model: Path, sprung: Callable[[], list[str]]) -> None:
    doors.MODEL[door](model)
    try:
        build_on_meta(load_config(model))
    except InputError as error:
        assert str(model) in str(error), error
        assert door not in INNOCENT
    else:
        assert door in INNOCENT
    assert sprung() == []
    assert doors.EVIL not in sys.modules


@pytest.mark.slow
@pytest.mark.parametrize("door", doors.MODEL)
def test_a_config_has_nothing_run_by_a_verb(
    door: str, model: Path, here: Here, sprung: Callable[[], list[str]]
) -> None:
    doors.MODEL[door](model)
    for verb in FROM_A_CONFIG:
        told(here, verb, model)
    with nullcontext() if door in INNOCENT else pytest.raises(InputError):
        hfpatch.inspect(str(model))
    assert sprung() == []


@pytest.mark.slow
@pytest.mark.parametrize("door", [*doors.MODEL, *doors.WEIGHTS])
def test_a_checkpoint_has_nothing_run(
    door: str, model: Path, healthy: Path, bundle: Path, here: Here, sprung: Callable[[], list[str]]
) -> None:
    (doors.MODEL | doors.WEIGHTS)[door](model)
    folders = {"MODEL": model, "HEALTHY": healthy, "BUNDLE": bundle}
    for verb, words in WITH_WEIGHTS.items():
        told(here, verb, *(folders.get(word, word) for word in words))
    assert sprung() == []


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bundles")
    ids = torch.arange(12)[None] % 64
    return skipped(tiny().train(), place, poisoned(tiny(), ids))


@pytest.mark.parametrize("door", doors.ADAPTERS)
def test_an_adapter_has_nothing_run(
    door: str, model: Path, bundle: Path, here: Here, sprung: Callable[[], list[str]], tmp_path: Path
) -> None:
    place = tmp_path / "adapter"
    place.mkdir()
    doors.adapter()(place)
    (place / "cache.bin").write_bytes(doors.PICKLE)
    doors.edit(place, "adapter_config.json", base_model_name_or_path=str(model), **doors.ADAPTERS[door])
    assert "adapter_config.json" in here("replay", bundle, "--model", place, code=2).sentence
    assert "adapter_config.json" in here("scan", place, "--model", model, code=2).sentence
    assert sprung() == []


@pytest.mark.parametrize("door", doors.MODEL)
def test_a_proof_is_of_a_name(
    door: str, model: Path, here: Here, sprung: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not of a checkpoint, even in the folder of one."""
    doors.MODEL[door](model)
    monkeypatch.chdir(model)
    told = here("prove", "fp16-residual-overflow", "--architecture", model, code=2).sentence
    assert "no tiny model of it can be built here" in told
    assert "no patch" in here("prove", model, code=2).sentence
    assert sprung() == []


def test_a_bundle_names_no_kernel(
    bundle: Path, model: Path, here: Here, sprung: Callable[[], list[str]], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / bundle.name))
    about = json.loads((copy / folder.ABOUT).read_text())
    del about["sha256"]
    for name in (doors.KERNEL, "flash_attention_2"):
        about["model"]["attention"] = name
        (copy / folder.ABOUT).write_text(json.dumps({**about, "sha256": folder.digest(about)}))
        assert "code from the hub" in here("replay", copy, "--model", model, code=2).sentence
    assert sprung() == []


@pytest.mark.parametrize("kind", doors.SPECIAL)
@pytest.mark.parametrize("name", ["config.json", "config.5.0.0.json"])
def test_a_config_is_an_ordinary_file(name: str, kind: str, model: Path) -> None:
    if name == "config.5.0.0.json":
        doors.second_file()(model)
    doors.special(model, kind, name)
    with pytest.raises(InputError, match=r"not an ordinary file|68,719,476,736"):
        load_config(model)


@pytest.mark.parametrize(
    ("architecture", "key"),
    [("bert", "type_vocab_size"), ("t5", "relative_attention_num_buckets"), ("mamba", "conv_kernel")],
)
def test_a_plan_builds_nothing_of_an_absurd_size(architecture: str, key: str, tmp_path: Path) -> None:
    """A plan runs tiny models with values of the config; these made models of gigabytes."""
    doors.edit(tmp_path, "config.json", **{**tiny_config(architecture).to_dict(), key: 20_000_000})
    model = build_on_meta(load_config(tmp_path))
    before = fuzz.peak(again=True)
    hfpatch.plan(model)
    assert fuzz.peak() - before < 2**28


def test_a_link_to_itself_is_no_config(model: Path) -> None:
    (model / "config.json").unlink()
    (model / "config.json").symlink_to("config.json")
    with pytest.raises(InputError, match="what has this name is not an ordinary file"):
        load_config(model)


@pytest.mark.parametrize("kind", doors.SPECIAL)
@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "model.safetensors", "notes.txt"])
def test_all_files_beside_the_weights_are_ordinary(name: str, kind: str, model: Path) -> None:
    doors.special(model, kind, name)
    if kind != "directory" or name == "model.safetensors":
        with pytest.raises(InputError, match=re.escape(str(model))):
            load_model(str(model))
    if name == "model.safetensors":  # large weights are weights; these have no header
        assert scan(model).findings


@pytest.mark.parametrize("kind", doors.SPECIAL)
def test_files_that_are_named_are_ordinary(kind: str, model: Path, bundle: Path, tmp_path: Path) -> None:
    doors.special(tmp_path, kind, "args.yaml")
    with pytest.raises(InputError, match="want a JSON or YAML file"):
        settings_file(tmp_path / "args.yaml")
    if kind == "64 GiB":
        assert read_text(str(tmp_path / "args.yaml"), 3) == "\0" * 3 * CHARACTERS, "the beginning is read"
    else:
        with pytest.raises(InputError, match="is not an ordinary file"):
            read_text(str(tmp_path / "args.yaml"), 10**12)
    for name in (folder.ABOUT, folder.BATCH):
        copy = Path(shutil.copytree(bundle, tmp_path / f"copy-{name}"))
        doors.special(copy, kind, name)
        with pytest.raises(InputError, match="use another bundle"):
            read_bundle(copy)
    index = "model.safetensors.index.json"
    doors.special(model, kind, index)
    if kind != "directory":
        with pytest.raises(InputError, match=index):
            scan(model / index)


YAML: dict[str, str] = {
    "an alias": "a: &a [1, 2]\nb: *a\n",
    "a bomb": "a: &a [x, x, x]\nb: &b [*a, *a, *a]\nfp16: *b\n",
    "a merge": "base: &base {fp16: true}\n<<: *base\n",
    "a key twice": "fp16: true\nfp16: false\n",
    "a tag of Python": "fp16: !!python/object/apply:os.system ['true']\n",
    "a tag of its own": "fp16: !mine 3\n",
    "no number with the tag of one": "learning_rate: !!int abc\n",
    "nothing with the tag of a number": "learning_rate: !!int ''\n",
    "no float": "learning_rate: !!float many\n",
    "no date": "learning_rate: 2001-13-45\n",
    "a date": "learning_rate: 2001-12-14\n",
    "nothing with the tag of a date": "learning_rate: !!timestamp x\n",
    "a set": "fp16: !!set {a, b}\n",
    "not a number": "learning_rate: .nan\n",
    "infinity": "learning_rate: .inf\n",
    "a number of many digits": f"learning_rate: {'9' * 5000}\n",
    "a large number": f"gradient_accumulation_steps: {10**400}\n",
    "half a step": "gradient_accumulation_steps: 1.5\n",
    "no steps": "gradient_accumulation_steps: 0\n",
    "a list of steps": "gradient_accumulation_steps: [1]\n",
    "digits of another script": "learning_rate: '١٢'\n",
    "a null byte": "fp16: \0\n",
    "a control character": "fp16: \x07\n",
    "deep": "[" * 100_000,
    "deep, by lines": "- " * 50_000,
    "a mapping as key": "? {a: b}\n: c\n",
    "two documents": "fp16: true\n---\nfp16: false\n",
    "no mapping": "- fp16\n",
    "a tab": "fp16:\n\ttrue\n",
    "both": "fp16: on\nbf16: yes\n",
    "a word": "fp16: maybe\n",
}


@pytest.mark.parametrize("case", YAML)
def test_odd_arguments_get_a_sentence(case: str, tmp_path: Path) -> None:
    file = tmp_path / "args.yaml"
    file.write_text(YAML[case], encoding="utf-8")
    with pytest.raises(InputError) as error:
        read_settings(settings_file(file))
    assert "\n" not in str(error.value)
    assert 20 < len(str(error.value)) < 500


JSON: dict[str, bytes] = {
    "a key twice": b'{"fp16": true, "fp16": false}',
    "many digits": b'{"learning_rate": ' + b"9" * 5000 + b"}",
    "a large number": b'{"learning_rate": 1e999}',
    "deep": b'{"a":' * 50_000,
    "no text": b"\xff\xfe{}",
    "a lone surrogate": b'{"optim_args": "{\\ud800"}',
    "text that is deep": json.dumps({"optim_args": "{" + '"a":{' * 40_000}).encode(),
    "a pickle": doors.PICKLE,
}


@pytest.mark.parametrize("case", JSON)
def test_odd_json_gets_a_sentence(case: str, tmp_path: Path, sprung: Callable[[], list[str]]) -> None:
    file = tmp_path / "args.json"
    file.write_bytes(JSON[case])
    with pytest.raises(InputError) as error:
        read_settings(settings_file(file))
    assert "\n" not in str(error.value)
    assert 20 < len(str(error.value)) < 500
    assert sprung() == []


def test_yaml_is_read_as_the_trainer_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "args.yaml"
    file.write_text("fp16: on\ngradient_accumulation_steps: 010\nlearning_rate: 1e-4\n")
    settings = read_settings(settings_file(file))
    assert (settings.precision, settings.accumulation, settings.rate) == ("fp16", 8, 1e-4)


def test_the_beginning_of_a_text_ends_within_a_character(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("é" * 1000, encoding="utf-8")
    assert set(read_text(str(file), 1)) == {"é"}
    assert len(read_text(str(file), 1)) == CHARACTERS // 2
    file.write_bytes(b"abc\xc3")
    with pytest.raises(InputError, match="not UTF-8 at byte 3"):
        read_text(str(file), 10)


def test_an_ordinary_file_is_read_whole_and_no_larger_one(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(file)
    assert read_ordinary(file, 5) == read_ordinary(tmp_path / "link", 5) == b"12345"
    assert read_ordinary(file, 3, beginning=True) == b"123"
    assert read_ordinary(file, 2**70) == read_ordinary(file, 2**62, beginning=True) == b"12345"
    with pytest.raises(InputError, match="it has 5 bytes, and at most 4 are read"):
        read_ordinary(file, 4)
    with pytest.raises(FileNotFoundError):
        read_ordinary(file / "below", 4)
    with pytest.raises(InputError, match="its name cannot be one of a file"):
        read_ordinary("\0", 4)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_kernels_package_that_is_installed_is_not_asked(healthy: Path, bundle: Path, tmp_path: Path) -> None:
    """In a process that really has one: transformers decides by its metadata, once."""
    site = traps.install(tmp_path / "site", import_utils.KERNELS_MIN_VERSION)
    command = [sys.executable, "-m", "tests.hostile.process", *map(str, (healthy, bundle, tmp_path / "work"))]
    path = os.pathsep.join([str(ROOT), str(site)])
    ran = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["kernels"] is True, "transformers sees the package"
    assert found["control"], "asked by transformers itself, the trap is sprung"
    assert found["sprung"] == {}
    assert found["cases"] == len(doors.MODEL) * len(process.VERBS)
