"""Names from files and from the command line cannot control a terminal, turn text around or stop the printing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hfpatch.errors import GuardStop, InputError, UnknownPatchError
from hfpatch.printable import printable
from hfpatch.report import Sheet, say
from tests.conftest import Ran
from tests.hostile import doors
from tests.test_hostile import healthy as healthy  # noqa: PLC0414 - a fixture
from tests.test_hostile import model as model  # noqa: PLC0414 - a fixture

EVIL = "\x1b]0;owned\x07\u202egpj"
SAFE = r"\x1b]0;owned\x07\u202egpj"
Here = Callable[..., Ran]
Plant = Callable[[Path], object]


def test_printable() -> None:
    assert printable(EVIL) == SAFE
    assert printable("a\nb\té\ud800") == "a\nb\\té\\ud800"
    assert printable("a\nb", lines=False) == r"a\nb"
    ordinary = "residual add in model.layers.7: 5.5e+04 → 日本語"
    assert printable(ordinary) == ordinary


def test_errors_are_printable() -> None:
    for cls in (InputError, UnknownPatchError):
        assert str(cls(f"{EVIL}\n")) == SAFE + r"\n"
    assert str(GuardStop(f"why: {EVIL}\nand what to do")) == f"why: {SAFE}\nand what to do"


def test_tables_and_lines_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    table = Sheet(EVIL, ("name",), ((EVIL,),), (EVIL,))
    assert table.to_text().count(SAFE) == table.to_html().count(SAFE) == 3
    say([EVIL])
    assert capsys.readouterr().err == f"{SAFE}\n"


def tensors(folder: Path) -> None:
    save_file({EVIL: torch.tensor([float("nan")])}, folder / "model.safetensors", {"format": "pt"})


CONFIGS: dict[str, Plant] = {
    "a key": doors.config(**{f"{EVIL}_size": 10**12}),
    "an attention implementation": doors.config(attn_implementation=EVIL),
    "a class in its code": doors.config(model_type=EVIL, auto_map={"AutoConfig": EVIL}),
    "a method of quantisation": doors.config(quantization_config={"quant_method": EVIL}),
    "a file in its place": lambda folder: (folder / "config.json").rename(folder / EVIL),
    "a name that is not UTF-8": lambda folder: (folder / "config.json").rename(
        os.fsdecode(os.fsencode(folder) + b"/0\xff\x1b.json")
    ),
}
LOADED: dict[str, Plant] = {
    "a tensor": tensors,
    "a key of a tokenizer": lambda folder: doors.edit(folder, "tokenizer_config.json", **{f"{EVIL}_file": "/dev/zero"}),
    "a key that generates": lambda folder: doors.edit(folder, "generation_config.json", cache_implementation=EVIL),
    "a pipe": lambda folder: os.mkfifo(folder / EVIL),
    "a pickle": lambda folder: (folder / "model.safetensors").rename(folder / f"{EVIL}.bin"),
}


def is_safe(ran: Ran) -> None:
    text = ran.stdout + ran.stderr
    assert all(line.isprintable() for line in text.split("\n")), repr(text)
    text.encode()


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_names_it(case: str, model: Path, here: Here) -> None:
    CONFIGS[case](model)
    is_safe(here("plan", model, code=0 if "quantisation" in case else 2))
    is_safe(ran := here("inspect", model, code=0 if "quantisation" in case else 2))
    assert "\\x1b" in ran.stdout + ran.stderr


@pytest.mark.parametrize("case", LOADED)
def test_a_file_beside_it_names_it(case: str, model: Path, here: Here) -> None:
    LOADED[case](model)
    is_safe(ran := here("trace", model, "--device", "cpu", code=0 if case == "a tensor" else 2))
    assert "\\x1b" in ran.stdout + ran.stderr
    if case == "a tensor":
        is_safe(here("scan", model, code=1))


@pytest.mark.parametrize("name", [EVIL, "a\nhfpatch: all is well", os.fsdecode(b"\xff")])
def test_a_folder_is_called_it(name: str, healthy: Path, tmp_path: Path, here: Here) -> None:
    missing, there = tmp_path / "none" / name, tmp_path / name
    for verb in ("inspect", "scan"):
        is_safe(ran := here(verb, missing, code=2))
        assert ran.sentence.startswith(f"hfpatch: {printable(str(missing), lines=False)}")
    shutil.copytree(healthy, there)
    is_safe(here("inspect", there))
    json.loads(here("inspect", there, "--json").stdout)
    is_safe(here("scan", there))
