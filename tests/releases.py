"""What changed between two installed releases of transformers, torch or peft in the code that hfpatch leans on.

`python -m tests.releases OLD NEW` takes two virtual environments, or folders of installed packages. Nothing in them is
imported: sources are parsed. It lists

- the bodies of forwards that proofs were run with, and that are gone or other in NEW: proofs of their architectures
  do not count there, so a plan runs the repros again;
- the private names behind `hfpatch/compat` that NEW no longer defines, or defines with another body.

Each with the patches that it touches. It ends with 1 if there is any.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import grimp

from hfpatch.patching import registry
from hfpatch.patching.proofs.bodies import body_digest
from hfpatch.patching.proofs.shelf import shipped
from tests.house import DOORS, private_names

PACKAGES = ("transformers", "torch", "peft")
FORWARDS = {"transformers": ("models", "integrations", "."), "torch": ("nn/modules",), "peft": ()}
"""Package -> the folders in which forwards are looked for; in `.` without those below it."""
SHOWN = 3
"""Number of files that are named for a private name."""


@dataclass(frozen=True)
class Change:
    """Something that hfpatch leans on and that is not as it was.

    Attributes:
        package: The package it is in.
        name: `file: Class.forward`, or a private name and some of the files that define it.
        what: `new`, `gone`, `new body`, `new body or gone` or `no longer defined`.
        leans: The module of `compat`, or the architectures whose proofs have the body.
        patches: Ids of the patches that it touches.
    """

    package: str
    name: str
    what: str
    leans: tuple[str, ...]
    patches: tuple[str, ...]


def site_packages(place: Path) -> Path:
    """Return the folder of installed packages: the one given, or that of a virtual environment."""
    for folder in (place, *sorted(place.glob("lib/python3*/site-packages")), place / "Lib" / "site-packages"):
        if any((folder / package).is_dir() for package in PACKAGES):
            return folder
    raise SystemExit(f"{place}: none of {', '.join(PACKAGES)} is installed there")


def release(folder: Path, package: str) -> str:
    """Return the release of a package in a folder; empty if it is not installed there."""
    found = (re.fullmatch(rf"{package}-(.+)\.dist-info", each.name) for each in folder.glob(f"{package}-*.dist-info"))
    return next((match[1].partition("+")[0] for match in found if match), "")


@cache
def _parsed(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def forwards(folder: Path, package: str) -> dict[str, str]:
    """Return the digest of every forward of a package, as proofs have it, by file and class."""
    found: dict[str, str] = {}
    for part in FORWARDS[package]:
        top = folder / package / part
        for file in sorted(top.glob("*.py") if part == "." else top.rglob("*.py")):
            if file.name.startswith("modular_"):
                continue  # from which the modeling file beside it is made
            for node in ast.walk(_parsed(file) or ast.Module([], [])):
                if isinstance(node, ast.ClassDef):
                    for inner in node.body:
                        if isinstance(inner, ast.FunctionDef) and inner.name == "forward":
                            found[f"{file.relative_to(folder)}: {node.name}.forward"] = body_digest(
                                copy.deepcopy(inner)
                            )
    return found


def leaning() -> dict[str, dict[str, set[str]]]:
    """Return the digests in proofs -> the patches that have one -> the architectures they were tried on."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for entry in registry.entries().values():
        for proof in shipped(entry.file):
            for body in proof.subject.bodies:
                found[body][entry.id].add(proof.subject.architecture)
    return found


def changed_bodies(old: Path, new: Path, package: str) -> Iterator[Change]:
    """Yield the forwards that differ, where a proof was run with the old body or with the new one."""
    before, after, lean = forwards(old, package), forwards(new, package), leaning()
    for name in sorted(before.keys() | after.keys()):
        bodies = {before.get(name), after.get(name)} - {None}
        of = [lean[body] for body in bodies if body in lean] if before.get(name) != after.get(name) else []
        if of:
            what = "new body" if name in before and name in after else "gone" if name in before else "new"
            architectures = set[str]().union(*(tried for each in of for tried in each.values()))
            patches = set[str]().union(*of)
            yield Change(package, name, what, tuple(sorted(architectures)), tuple(sorted(patches)))


def doors() -> dict[str, set[str]]:
    """Return the private names of other packages -> the modules of `compat` that use them."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in sorted(DOORS.glob("*.py")):
        for _, text in private_names(file):
            for name in text.strip(".").split("."):
                if re.fullmatch(r"_[a-zA-Z]\w*", name):
                    found[name].add(file.stem)
    return found


def definitions(folder: Path, package: str, names: frozenset[str]) -> dict[str, dict[str, str]]:
    """Return where a package defines names, and the digest of what it does there: functions, classes, attributes."""
    wanted = re.compile(r"\b(?:" + "|".join(sorted(names)) + r")\b")
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for file in sorted((folder / package).rglob("*.py")):
        if "/models/" in str(file) and package == "transformers" and "/auto/" not in str(file):
            continue  # 2,000 files that use such names
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if wanted.search(source) and (tree := _parsed(file)) is not None:
            for node, name in _defined(tree):
                if name in names:
                    place = str(file.relative_to(folder))
                    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
                    found[name][place] = body_digest(copy.deepcopy(node)) if isinstance(node, functions) else ""
    return found


def _defined(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node, node.name
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node, node.id if isinstance(node, ast.Name) else node.attr


@cache
def patches_through(door: str) -> tuple[str, ...]:
    """Return the patches whose code goes through a module of `compat`, by imports."""
    graph = grimp.build_graph("hfpatch", exclude_type_checking_imports=True, cache_dir=None)
    above = graph.find_downstream_modules(f"hfpatch.compat.{door}")
    out: list[str] = []
    for entry in registry.entries().values():
        taken = [n for n in ast.walk(ast.parse(entry.file.read_text())) if isinstance(n, ast.ImportFrom)]
        imported = {n.module for n in taken} | {f"{n.module}.{alias.name}" for n in taken for alias in n.names}
        if imported & {*above, f"hfpatch.compat.{door}"}:
            out.append(entry.id)
    return tuple(out)


def changed_names(old: Path, new: Path, package: str) -> Iterator[Change]:
    """Yield the private names that the old release defines, and the new one does not or with another body."""
    by_door = doors()
    names = frozenset(by_door)
    before, after = definitions(old, package, names), definitions(new, package, names)
    for name, places in sorted(before.items()):
        used = tuple(sorted(by_door[name]))
        touched = tuple(dict.fromkeys(patch for door in used for patch in patches_through(door)))
        if name not in after:
            yield Change(package, name, "no longer defined", used, touched)
            continue
        other = [place for place, digest in places.items() if digest and after[name].get(place) != digest]
        if other:
            more = f" and {len(other) - SHOWN} more" if len(other) > SHOWN else ""
            yield Change(package, f"{name} in {', '.join(other[:SHOWN])}{more}", "new body or gone", used, touched)


def changes(old: Path, new: Path) -> tuple[dict[str, tuple[str, str]], list[Change]]:
    """Return the releases of each package in both folders, and what changed in those that are in both."""
    releases = {p: (release(old, p), release(new, p)) for p in PACKAGES}
    found: list[Change] = []
    for package, (a, b) in releases.items():
        if a and b and a != b:
            found += [*changed_bodies(old, new, package), *changed_names(old, new, package)]
    return releases, found


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("old", type=Path)
    words.add_argument("new", type=Path)
    words.add_argument("--json", action="store_true")
    given = words.parse_args()
    releases, found = changes(site_packages(given.old), site_packages(given.new))
    if given.json:
        print(json.dumps({"releases": releases, "changes": [asdict(change) for change in found]}, indent=1))
        sys.exit(bool(found))
    for package, (a, b) in releases.items():
        told = f"{a} -> {b}" if a and b and a != b else "the same" if a and a == b else "not in both, so not compared"
        print(f"{package}: {told}")
    total = len(registry.entries())
    for change in found:
        patches = f"all {total} patches" if len(change.patches) == total else ", ".join(change.patches) or "no patch"
        leans = ", ".join(change.leans[:6]) + (f" and {len(change.leans) - 6} more" if len(change.leans) > 6 else "")
        print(f"  {change.name}: {change.what} ({leans}) -> {patches}")
    print(f"{len(found)} changes")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
