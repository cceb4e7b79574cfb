"""The manifest in other processes: replayed in a new one, saved by one that is killed, and with installed packages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import hfpatch
from hfpatch.patching import registry
from hfpatch.patching.verifying.proving import repros
from hfpatch.patching.verifying.trial import build
from hfpatch.report.files import write_atomically
from tests.test_installed import Site
from tests.test_installed import site as site  # noqa: PLC0414 - a fixture
from tests.test_register import process

ROOT = Path(__file__).parent.parent
LEFT_OUT = {
    "cudnn-attention-backward-nan",  # needs a GPU
    "lora-target-expansion",  # PEFT saves its layers, see tests/test_manifest.py
}
PATCH = (ROOT / "patches" / "shared" / "eps_alignment.py").read_text()


def test_each_patch_gives_the_same_bits_in_a_new_process(tmp_path: Path) -> None:
    want: dict[str, torch.Tensor] = {}
    for patch_id, entry in registry.entries().items():
        if patch_id in LEFT_OUT:
            continue
        trial = build(next(c for c in repros(entry) if c.device == "cpu"))
        rest = [name for name in registry.entries() if name not in {patch_id, *entry.patch.needs}]
        batch = trial.inputs() if trial.case.branches else None
        fix = hfpatch.apply(trial.model, include=patch_id, exclude=rest, batch=batch, verbose=False)
        (folder := tmp_path / patch_id).mkdir()
        held = {name: value.contiguous().clone() for name, value in trial.model.state_dict().items()}
        save_file(held, folder / "weights.safetensors")
        fix.save(folder)
        want[patch_id] = trial.logits()
    process(
        """
        import pathlib
        import hfpatch
        from hfpatch.patching import registry
        from hfpatch.patching.verifying.proving import repros
        from hfpatch.patching.verifying.trial import build
        from safetensors.torch import load_file, save_file

        for folder in sorted(p for p in pathlib.Path().iterdir() if p.is_dir()):
            trial = build(next(c for c in repros(registry.get(folder.name)) if c.device == "cpu"))
            trial.model.load_state_dict(load_file(folder / "weights.safetensors"))
            hfpatch.apply(trial.model, manifest=folder, verbose=False)
            save_file({"logits": trial.logits().contiguous()}, folder / "logits.safetensors")
        """,
        tmp_path,
    )
    assert len(want) > 12
    for patch_id, logits in want.items():
        got = load_file(tmp_path / patch_id / "logits.safetensors")["logits"]
        torch.testing.assert_close(got, logits, rtol=0, atol=0, equal_nan=True, msg=patch_id)


def test_a_patch_file_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "my_eps.py").write_text(PATCH)
    made = """
        import torch, hfpatch
        from hfpatch.testing import SpeechLLM, tiny_model
        torch.manual_seed(0)
        model = SpeechLLM(tiny_model("llama"))
    """
    process(
        f"""{made}
        hfpatch.register("my_eps.py")
        hfpatch.apply(model, only="my-eps", verbose=False).save(".")
        """,
        tmp_path,
    )
    process(
        f"""{made}
        before = model.ln_speech.eps
        try:
            hfpatch.apply(model, manifest=".", verbose=False)
        except hfpatch.errors.RefusedError as error:
            assert "needs the patch my-eps of registered by hand, which is not registered in this process" in str(error)
        else:
            raise SystemExit("it was replayed")
        assert model.ln_speech.eps == before
        hfpatch.register("my_eps.py")
        hfpatch.apply(model, manifest=".", verbose=False)
        assert model.ln_speech.eps == model.llm.config.rms_norm_eps != before
        """,
        tmp_path,
    )


@pytest.mark.slow
def test_a_patch_of_an_installed_package(site: Site, tmp_path: Path) -> None:
    """Its module is imported only if its package is trusted in this call."""
    site.script(f"""
        hfpatch.apply(tiny_model("llama"), include="acme-fine", exclude="fp*").save({str(tmp_path)!r})
    """)
    assert site.imported() == {"acme-patches", "fine"}
    out = site.script(f"""
        model = tiny_model("llama")
        try:
            hfpatch.apply(model, manifest={str(tmp_path)!r})
        except hfpatch.errors.RefusedError as error:
            print(error)
        assert "acme_fine" not in vars(model)
    """)
    assert "needs the patch acme-fine of acme-patches 1.2, which is not registered in this process; it is" in out
    assert "offered by acme-patches 1.2, whose code is not run unasked: pass trust='acme-patches' to run it" in out
    assert site.imported() == set()
    out = site.script(f"""
        model = tiny_model("llama")
        fix = hfpatch.apply(model, manifest={str(tmp_path)!r}, trust="acme-patches")
        print(hfpatch.status(model).patches, model.acme_fine, fix.plan.decisions[0].origin)
    """)
    assert "('acme-fine',) 1 acme-patches 1.2" in out
    assert site.imported() == {"acme-patches", "fine"}


KILLED = 60


def test_a_process_that_is_killed_leaves_one_manifest_or_the_other(tmp_path: Path) -> None:
    """A child saves two manifests with tensors in turn and is killed at many moments; the next one leaves no rest."""
    process(
        f"""
        import os, pathlib, random, signal, time
        import torch, hfpatch
        from hfpatch.patching.manifest.file import TENSORS, read, read_tensors
        from hfpatch.testing import SpeechLLM, tiny_model

        def made():
            torch.manual_seed(0)
            return SpeechLLM(tiny_model("llama"))

        fixes = [
            hfpatch.apply(made(), only="projection-init", options={{"projection-init": {{"std": std}}}}, verbose=False)
            for std in (0.5, 0.25)
        ]
        folder, draw, stands = pathlib.Path(), random.Random(0), set()
        for fix in fixes:
            start = time.perf_counter()
            fix.save(folder)
            took = time.perf_counter() - start
        for turn in range({KILLED}):
            done, tell = os.pipe()
            child = os.fork()
            if not child:
                while True:
                    for fix in fixes:
                        fix.save(folder)
                        os.write(tell, b".")
            for _ in range(turn % 3):  # also on a busy machine, both are saved in some of the turns
                os.read(done, 1)
            time.sleep(draw.uniform(0, took))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(done), os.close(tell)
            manifest = read(folder)
            stands.add(manifest.patches[0].options["std"])
            assert read_tensors(folder, manifest)
            hfpatch.apply(made(), manifest=folder, verbose=False)
            fixes[0].save(folder)  # what a kill between the two calls of a rename left is removed by it
            left = [str(p) for p in folder.rglob("*") if p.name.endswith(".tmp")]
            assert not left, left
        assert stands == {{0.5, 0.25}}, stands
        fixes[0].save(folder)
        assert sorted(p.name for p in folder.iterdir()) == ["hfpatch-tensors", "hfpatch.json"]
        assert len(list((folder / TENSORS).iterdir())) == 1
        """,
        tmp_path,
    )


def test_what_a_killed_process_left_is_removed_by_the_next_write(tmp_path: Path) -> None:
    """Killed between the two system calls in which a file has a temporary name."""
    process(
        """
        import os, signal
        from hfpatch.report.files import write_atomically

        write_atomically("a.json", "old")
        os.rename = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        if not (child := os.fork()):
            write_atomically("a.json", "new")
        os.waitpid(child, 0)
        """,
        tmp_path,
    )
    left = [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]
    assert len(left) == 1
    assert (tmp_path / "a.json").read_text() == "old"
    write_atomically(tmp_path / "a.json", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "new"


@pytest.mark.parametrize("fault", ["no unnamed files", "no /proc", "no locks"])
def test_a_file_system_that_can_less(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(95, "Operation not supported")

    if fault == "no unnamed files":
        monkeypatch.delattr(os, "O_TMPFILE")
    elif fault == "no /proc":
        monkeypatch.setattr(os, "link", refused)
    else:
        monkeypatch.setattr("fcntl.flock", refused)
    for text in ("one", "two"):
        write_atomically(tmp_path / "a.json", text)
        assert (tmp_path / "a.json").read_text() == text
        assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
