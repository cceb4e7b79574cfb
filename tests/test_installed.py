"""Patches of installed packages: real packages, built by hatchling and installed by pip, asked for in new processes.

Nothing of them runs unasked; what fails is named; ids that two of them use are not hidden.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from hfpatch.lab.tiny import tiny_config
from hfpatch.patching.registering import installed
from hfpatch.patching.registering.installed import Offer, Package
from hfpatch.patching.registering.patch_file import by_path
from tests.processes import python

pytestmark = pytest.mark.slow

PATCH = '''\
"""A patch of another package.

## What goes wrong
Nothing.

## What this changes
An attribute.

## Numerics
exact.

## Known limits
None.

## Sources
This test.
"""
{top}
from hfpatch.patching import edits, select
from hfpatch.patching.language import Case, Needed, Patch

open({mark!r}, "a").write("{name} was imported\\n")


def condition(context):
    {body}


PATCH = Patch(
    title="An attribute of the submodel",
    architectures=("*",),
    condition=condition,
    edits=(edits.set_attribute(select.submodel(), "acme_{name}", lambda _c, _t: 1, "set it"),),
    effect="exact",
    symptom=lambda trial: None if "acme_{name}" in vars(trial.model) else "it is not set",
    repros=(Case("llama"),),
    leaves_alone=(Case("gpt2"),),
)
'''
NEEDED = 'return Needed("it always is")'
FILES = {
    "fine": ("", NEEDED),
    "leaves": ("import sys\nsys.exit(3)", NEEDED),
    "odd": ("class Odd(BaseException): ...\nraise Odd('of its own')", NEEDED),
    "raises": ("", 'raise RuntimeError("boom")'),
    "exits": ("", "import sys; sys.exit(4)"),
    "slow": ("import time\ntime.sleep(600)", NEEDED),
    "twin": ("", NEEDED),
    "eps_alignment": ("", NEEDED),
}


def project(folder: Path, name: str, points: dict[str, str], files: dict[str, tuple[str, str]], mark: Path) -> Path:
    """A package to build: a pyproject.toml, and a module for each patch."""
    module = name.replace("-", "_")
    (folder / module).mkdir(parents=True)
    (folder / module / "__init__.py").write_text(f"open({str(mark)!r}, 'a').write('{name} was imported\\n')\n")
    for file, (top, body) in files.items():
        text = PATCH.format(name=file, top=top, body=body, mark=str(mark))
        (folder / module / f"{file}.py").write_text(text)
    entries = "\n".join(f'{patch_id} = "{target}"' for patch_id, target in points.items())
    (folder / "pyproject.toml").write_text(
        f'[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n\n[project]\nname = "{name}"\n'
        f'version = "1.2"\n\n[project.entry-points."hfpatch.patches"]\n{entries}\n'
    )
    return folder


class Site:
    """A folder with the installed packages, and a file to which each of their modules writes when it is imported."""

    def __init__(self, folder: Path) -> None:
        self.path, self.mark = folder / "site", folder / "imported.txt"
        acme = {f"acme-{n.replace('_', '-')}": f"acme_patches.{n}" for n in FILES if n not in ("twin", "eps_alignment")}
        acme |= {"twin": "acme_patches.twin", "eps-alignment": "acme_patches.eps_alignment"}
        acme |= {"acme-gone": "acme_patches.gone", "acme-empty": "acme_patches"}
        rival = {"twin": "rival_patches.twin"}
        projects = [
            project(folder / "acme", "acme-patches", acme, FILES, self.mark),
            project(folder / "rival", "rival-patches", rival, {"twin": FILES["twin"]}, self.mark),
        ]
        command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "--quiet"]
        done = subprocess.run(
            [*command, "--disable-pip-version-check", "--target", str(self.path), *map(str, projects)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        self.imported()

    def imported(self) -> set[str]:
        """What was imported since the last call."""
        found = set(self.mark.read_text().splitlines()) if self.mark.exists() else set[str]()
        self.mark.unlink(missing_ok=True)
        return {line.split()[0] for line in found}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join([str(self.path), str(Path(__file__).parent.parent)])
        return python(*words, env={"PYTHONPATH": paths, "COLUMNS": "200"}, cwd=self.path)

    def script(self, text: str) -> str:
        """What a script prints, with hfpatch and a tiny llama at hand."""
        done = self.run("-c", f"import hfpatch\nfrom hfpatch.testing import tiny_model\n{textwrap.dedent(text)}")
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("installed"))


def test_nothing_runs_unasked(site: Site) -> None:
    """Modules that leave, sleep or raise neither end nor stall a bare call."""
    listed = site.run("-m", "hfpatch.cli", "list")
    assert listed.returncode == 0, listed.stderr
    for name in ("acme-fine", "acme-leaves", "acme-slow"):
        assert name in listed.stdout
    assert "acme-patches 1.2" in listed.stdout
    assert "hfpatch explain ID imports a patch of an installed package" in listed.stdout
    site.script("""
        import sys
        model = tiny_model("llama")
        hfpatch.explain("eps-alignment")
        plan = hfpatch.plan(model, include="suggested", exclude="acme-*")
        print(plan)
        fix = hfpatch.apply(model, include="suggested")
        hfpatch.status(model)
        hfpatch.revert(model, exclude="acme-fine")
        assert not [m for m in sys.modules if m.startswith(("acme", "rival"))]
        assert any("acme-fine (acme-patches 1.2)" in text for text in plan.unknown), plan.unknown
    """)
    assert site.imported() == set()


def test_json_of_list(site: Site) -> None:
    figures = json.loads(site.run("-m", "hfpatch.cli", "list", "--json").stdout)
    rows = {(r["id"], r["package"]): r for r in figures["installed"]}
    fine = rows["acme-fine", "acme-patches"]
    assert (fine["version"], fine["module"], fine["fault"]) == ("1.2", "acme_patches.fine", "")
    assert "it is that of rival-patches 1.2 (rival_patches.twin)" in rows["twin", "acme-patches"]["fault"]
    assert "it is that of acme-patches 1.2 (acme_patches.twin)" in rows["twin", "rival-patches"]["fault"]
    assert "it is that of a patch of hfpatch itself" in rows["eps-alignment", "acme-patches"]["fault"]
    assert "eps-alignment" in {p["id"] for p in figures["patches"]}
    assert site.imported() == set()


def test_named_it_runs_and_its_origin_is_shown_everywhere(site: Site, tmp_path: Path) -> None:
    out = site.script(f"""
        import contextlib, io, pickle
        model = tiny_model("llama")
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            fix = hfpatch.apply(model, include="acme-f*")
        print("SAID", said.getvalue())
        print("PLAN", " ".join(str(fix.plan).split()))
        print("STATUS", " ".join(str(hfpatch.status(model)).split()))
        (edit,) = hfpatch.status(model).to_dict()["edits"]
        print("JSON", fix.plan.to_dict()["decisions"][0]["origin"], edit["origin"])
        print("EXPLAIN", " ".join(str(hfpatch.explain("acme-fine")).split()))
        batch = dict(input_ids=__import__("torch").arange(8)[None])
        print("VERIFY", hfpatch.verify(model, batch, runs=["after"]))
        assert model.acme_fine == 1
        open({str(tmp_path / "model.pkl")!r}, "wb").write(pickle.dumps(model))
        hfpatch.revert(model, only="acme-fine")
        assert "acme_fine" not in vars(model)
    """)
    assert "acme-fine (acme-patches 1.2) applied (exact): 1 edit" in out
    assert "acme-fine applied exact" in out
    assert "acme-patches 1.2" in out.partition("PLAN")[2].partition("STATUS")[0]
    assert "STATUS Status of LlamaForCausalLM patch edits state first at acme-fine (acme-patches 1.2) 1 here" in out
    assert "JSON acme-patches 1.2 acme-patches 1.2" in out
    assert "from acme-patches 1.2, " in out.partition("EXPLAIN")[2]
    assert "runs only if it is named, or its package is trusted" in out.partition("EXPLAIN")[2]
    assert site.imported() == {"acme-patches", "fine"}

    script = """
        import pickle, hfpatch
        model = pickle.load(open("model.pkl", "rb"))
        assert "acme-fine (acme-patches 1.2)" in str(hfpatch.status(model))
        hfpatch.revert(model, only="acme-fine")  # in a process that has no such package
        assert not hfpatch.status(model).edits and "acme_fine" not in vars(model)
    """
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    words = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_trusted_they_are_planned_and_stay_opt_in(site: Site) -> None:
    out = site.script("""
        model = tiny_model("llama")
        failing = ["acme-leaves", "acme-odd", "acme-raises", "acme-exits", "acme-slow"]
        plan = hfpatch.plan(model, trust="Acme.Patches", exclude=failing)
        (fine,) = (d for d in plan.decisions if d.patch == "acme-fine")
        print("FINE", fine.decided, fine.code, fine.effect, fine.hint)
        assert not hfpatch.apply(model, trust=["acme-patches"], exclude=failing, verbose=False).edits
        assert hfpatch.apply(model, trust=["acme-patches"], include="suggested", exclude=failing, verbose=False).edits
        for d in plan.decisions:
            if d.code == "patch-raised":
                print("REFUSED", d.patch, "|", d.origin, "|", d.reason)
        for words in ({"trust": ["nobody"]}, {"options": {"acme-fine": {}}}, {"options": {"acme-fin": {}}}):
            try:
                hfpatch.plan(model, **words)
            except hfpatch.errors.InputError as error:
                print("ERROR", error)
    """)
    assert 'FINE opt-in another-package exact hfpatch.apply(model, include=["acme-fine"])' in out
    refused = {line.split()[1]: line for line in out.splitlines() if line.startswith("REFUSED")}
    assert set(refused) == {"twin", "eps-alignment", "acme-gone", "acme-empty"}
    assert "acme-patches 1.2 and rival-patches 1.2" in refused["twin"]
    assert "offered by acme-patches 1.2 (acme_patches.twin) and by rival-patches 1.2" in refused["twin"]
    assert "it is that of a patch of hfpatch itself, which is used" in refused["eps-alignment"]
    assert "acme_patches.gone: there is no module of that name" in refused["acme-gone"]
    assert "acme_patches/__init__.py:1: the file defines no PATCH" in refused["acme-empty"]
    assert "ERROR trust= (--trust): no installed package 'nobody' offers patches; there are: acme-patches, rival" in out
    assert "ERROR options: acme-fine is of an installed package: name it in only= or include= too" in out
    assert "ERROR no patch is called 'acme-fin': did you mean acme-fine" in out
    assert site.imported() == {"acme-patches", "fine"}


def test_what_ends_or_raises_is_a_refusal_that_names_patch_package_and_file(site: Site) -> None:
    out = site.script("""
        import contextlib, io
        for name in ("acme-leaves", "acme-odd", "acme-raises", "acme-exits"):
            model = tiny_model("llama")
            try:
                hfpatch.apply(model, only=name)
            except hfpatch.errors.RefusedError as error:
                print("ONLY", error)
            said = io.StringIO()
            with contextlib.redirect_stderr(said):
                fix = hfpatch.apply(model, include=[name, "acme-fine"])
            print("SAID", said.getvalue().splitlines()[0])
            assert [d.patch for d in fix.plan.of("applied")] == ["acme-fine"]
    """).splitlines()
    wanted = {
        "leaves": "SystemExit: 3",
        "odd": "Odd: of its own",
        "raises": "RuntimeError: boom",
        "exits": "SystemExit: 4",
    }
    asked, said = out[::2], out[1::2]
    for (name, what), only, line in zip(wanted.items(), asked, said, strict=True):
        file = site.path / "acme_patches" / f"{name}.py"
        reason = f"acme-{name} of acme-patches 1.2: {file}:"
        assert only.startswith(f"ONLY acme-{name} was asked for and is refused: {reason}")
        assert line.startswith(f"SAID hfpatch: refused: {reason}")
        assert only.endswith(f": {what}")
        assert line.endswith(f": {what}")
        number = int(only.partition(f"{name}.py:")[2].partition(":")[0])
        assert any(word in file.read_text().splitlines()[number - 1] for word in ("exit", "raise"))


def test_on_the_command_line(site: Site, tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    planned = site.run("-m", "hfpatch.cli", "plan", str(tmp_path), "--trust", "acme-patches", "--exclude", "acme-s*")
    assert planned.returncode == 0, planned.stderr
    assert "acme-patches 1.2" in planned.stdout
    assert "SystemExit: 3" in planned.stdout
    for words, text in (
        (("plan", str(tmp_path), "--trust", "nobody"), "no installed package 'nobody' offers patches"),
        (("explain", "acme-leaves"), "acme-leaves of acme-patches 1.2: "),
        (("explain", "twin"), "twin is offered by acme-patches 1.2 (acme_patches.twin) and by rival-patches 1.2"),
        (("verify", "acme-odd"), "acme-odd of acme-patches 1.2: "),
        (("explain", "acme-fin"), "did you mean acme-fine"),
    ):
        done = site.run("-m", "hfpatch.cli", *words)
        assert done.returncode == 2, (words, done.stdout)
        (line,) = done.stderr.splitlines()
        assert line.startswith("hfpatch: ")
        assert text in line
    assert site.run("-m", "hfpatch.cli", "explain", "eps-alignment").returncode == 0
    proved = site.run("-m", "hfpatch.cli", "verify", "acme-exits")
    assert proved.returncode == 1
    assert "SystemExit: 4" in proved.stdout


def test_ctrl_c_while_a_patch_is_imported_stays_one(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        by_path("interrupted", tmp_path / "interrupted.py")
    assert "interrupted" not in sys.modules


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, whose metadata is read anew."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(installed, "offers", installed.offers.__wrapped__)
    return tmp_path


def write(folder: Path, name: str, entry_points: bytes, metadata: bytes | None = None) -> None:
    info = folder / f"{name.replace('-', '_')}-1.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_bytes(entry_points)
    if metadata != b"":
        (info / "METADATA").write_bytes(metadata or f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n".encode())


def test_malformed_metadata_hides_no_other_package(on_path: Path) -> None:
    """importlib.metadata.entry_points raises TypeError if one file of any package has a line without `=`."""
    write(
        on_path,
        "good",
        b"[console_scripts]\nx = y\n\n[hfpatch.patches]\n# a note\ngood-one = good.one\n\n[other]\nz=z\n",
    )
    write(on_path, "no-equals", b"[hfpatch.patches]\nnonsense\n")
    write(on_path, "bytes", b"[hfpatch.patches]\n\xff\xfe = x\n")
    write(on_path, "nameless", b"[hfpatch.patches]\nlone = lone\n", b"")
    write(on_path, "odd", b"[hfpatch.patches]\na * = x\nsuggested = x\nattr = x:PATCH\ndots = ..x\n")
    found = installed.offers()
    assert found["good-one"] == (Offer("good-one", Package("good", "1"), "good.one"),)
    assert found["good-one"][0].fault == ""
    assert str(found["lone"][0]) == "a package without a name without a version (lone)"
    faults = {patch_id: offered[0].fault for patch_id, offered in found.items()}
    assert faults["nonsense"] == "its entry point names no module: ''"
    assert faults["attr"] == "its entry point names no module: 'x:PATCH'"
    assert faults["dots"] == "its entry point names no module: '..x'"
    for patch_id in ("a *", "suggested"):
        assert faults[patch_id] == f"{patch_id!r} cannot be the id of a patch: want letters, digits and hyphens"
    assert "z" not in found


def test_of_two_copies_of_a_package_the_first_on_the_path_counts(on_path: Path) -> None:
    for folder, module in (("a", "new.one"), ("b", "old.one")):
        (on_path / folder).mkdir()
        write(on_path / folder, "same", f"[hfpatch.patches]\none = {module}\n".encode())
    sys.path[:0] = [str(on_path / "a"), str(on_path / "b")]  # taken back by monkeypatch
    assert [offer.module for offer in installed.offers()["one"]] == ["new.one"]


def test_a_package_in_an_archive_is_found(on_path: Path) -> None:
    assert not installed.offers()
    with zipfile.ZipFile(on_path / "archive.zip", "w") as archive:
        archive.writestr("zipped-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: zipped\nVersion: 1\n")
        archive.writestr("zipped-1.dist-info/entry_points.txt", "[hfpatch.patches]\none = zipped.one\n")
    sys.path.insert(0, str(on_path / "archive.zip"))
    assert str(installed.offers()["one"][0]) == "zipped 1 (zipped.one)"
