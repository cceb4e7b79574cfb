"""The patches that installed packages offer, from the metadata of the packages alone: none of their code runs.

A package offers a patch by an entry point in the group `hfpatch.patches`: its name is the id of the patch, its value
the module that defines `PATCH`.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from hfpatch.errors import InputError

GROUP = "hfpatch.patches"

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Form of an id: no glob, no space."""
RESERVED = ("suggested",)
"""Words that `include=` gives another meaning."""
MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True, order=True)
class Package:
    """An installed package: its name and version."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True, order=True)
class Offer:
    """A patch that an installed package offers, as its metadata says.

    Attributes:
        id: Name of the entry point.
        package: The package.
        module: The module that defines `PATCH`.
    """

    id: str
    package: Package
    module: str

    def __str__(self) -> str:
        return f"{self.package} ({self.module})"

    @property
    def fault(self) -> str:
        """Why the entry point cannot be used; empty if it can."""
        if not valid(self.id):
            return f"{self.id!r} cannot be the id of a patch: want letters, digits and hyphens"
        if not MODULE.fullmatch(self.module):
            return f"its entry point names no module: {self.module!r}"
        return ""


def valid(patch_id: str) -> bool:
    """True if a string can be the id of a patch."""
    return ID.fullmatch(patch_id) is not None and patch_id not in RESERVED


@cache
def offers() -> dict[str, tuple[Offer, ...]]:
    """Return the patches that installed packages offer, by id; several for an id that several packages use.

    Read once in a process.
    """
    found: dict[str, list[Offer]] = {}
    packages: set[str] = set()
    for package, text in _declared():
        if canonical(package.name) not in packages:
            packages.add(canonical(package.name))
            for name, module in _entry_points(text):
                found.setdefault(name, []).append(Offer(name, package, module))
    return {patch_id: tuple(sorted(found[patch_id])) for patch_id in sorted(found)}


def of_packages(trusted: Iterable[str]) -> set[str]:
    """Return the ids of the patches that these packages offer.

    Raises:
        InputError: A package is not installed or offers no patch.
    """
    by_name: dict[str, set[str]] = {}
    for patch_id, offered in offers().items():
        for offer in offered:
            by_name.setdefault(canonical(offer.package.name), set()).add(patch_id)
    ids: set[str] = set()
    for name in trusted:
        if canonical(name) not in by_name:
            there = f"there are: {', '.join(sorted(by_name))}" if by_name else "no installed package does"
            raise InputError(f"trust= (--trust): no installed package {name!r} offers patches; {there}")
        ids |= by_name[canonical(name)]
    return ids


def canonical(package: str) -> str:
    """Return the name of a package in the one spelling that installers compare."""
    return re.sub(r"[-_.]+", "-", package).lower()


def _declared() -> Iterator[tuple[Package, str]]:
    """Yield each package that has entry points in the group, with the text of its entry points.

    `metadata.entry_points` raises an error if the file of any package is malformed.
    """
    if not _mentioned():
        return
    from importlib import metadata

    for distribution in metadata.distributions():
        try:
            text = distribution.read_text("entry_points.txt") or ""
            if GROUP in text:
                facts = distribution.metadata.json
                name, version = facts.get("name", "a package without a name"), facts.get("version", "without a version")
                yield Package(str(name), str(version)), text
        except (OSError, ValueError):  # a file that cannot be read or is not UTF-8
            continue


def _mentioned() -> bool:
    """True if a file of entry points on the path names the group, or if the path has an archive.

    Importing `importlib.metadata` would take a tenth of the time of `hfpatch list`.
    """
    for folder in sys.path:
        try:
            with os.scandir(folder or ".") as held:
                infos = [entry.path for entry in held if entry.name.lower().endswith("-info")]
        except NotADirectoryError:
            return True
        except OSError:
            continue
        for info in infos:
            with contextlib.suppress(OSError), open(f"{info}/entry_points.txt", "rb") as file:  # noqa: PTH123
                if GROUP.encode() in file.read():
                    return True
    return False


def _entry_points(text: str) -> Iterator[tuple[str, str]]:
    section = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1].strip()
        elif section == GROUP and line and not line.startswith(("#", ";")):
            name, _, module = line.partition("=")
            yield name.strip(), module.strip()
