"""300 mutations of each kind of file: each is taken, or refused with a sentence, soon, and nothing is run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.hostile import fuzz, traps

COUNT = 300


@pytest.mark.slow
@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_mutations(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(traps.install(tmp_path / "site"))
    found = fuzz.run(kind, COUNT)
    assert found.failed == []
    assert (found.mutations, found.tracebacks, found.hangs, found.memory_over_1_gb, found.code_run) == (COUNT, *[0] * 4)
    assert found.refused + found.taken == COUNT
    assert signal.getitimer(signal.ITIMER_REAL) == signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_a_number_makes_the_same_mutation_again(tmp_path: Path) -> None:
    from random import Random

    made: list[bytes] = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with pytest.raises(fuzz.HfpatchError):
            fuzz.args(tmp_path / name, Random("training arguments 0"))  # noqa: S311 - a seed, no secret
        made.extend(file.read_bytes() for file in (tmp_path / name).iterdir())
    assert made[0] == made[1]


def test_what_goes_wrong_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run without findings would mean nothing."""
    import importlib
    import time

    def hangs(*_: object) -> None:
        time.sleep(20)

    def raises(*_: object) -> None:
        raise ValueError("x")

    def imports(*_: object) -> None:
        with pytest.raises(RuntimeError, match="a trap ran"):
            importlib.import_module(traps.EVIL)

    held: list[bytearray] = []
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    monkeypatch.setattr(fuzz, "WAITING", 2)
    monkeypatch.setattr(fuzz, "MOST", 2**24)
    monkeypatch.syspath_prepend(traps.install(tmp_path / "site"))
    for name, case in {
        "hangs": hangs,
        "tracebacks": raises,
        "code_run": imports,
        "memory_over_1_gb": lambda *_: held.append(bytearray(2**28)),
    }.items():
        monkeypatch.setitem(fuzz.KINDS, name, case)
        found = fuzz.run(name, 1)
        assert getattr(found, name) == 1, (name, found)
        assert len(found.failed) == 1
