"""The patches by id: those in `patches/`, those that were registered by hand, and those of installed packages.

There is no list to maintain: a file in `patches/` that defines `PATCH` is a patch. The code of an installed package
runs only when one of its patches is asked for by `get`; everything else reads its metadata.
"""

from __future__ import annotations

import difflib
import fnmatch
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hfpatch import patches
from hfpatch.errors import PatchFileError, UnknownPatchError
from hfpatch.patching.language import ANY, Patch
from hfpatch.patching.proofs.proof import digest_of_file, unsaved
from hfpatch.patching.proofs.shelf import proved_names, shipped
from hfpatch.patching.registering import patch_file
from hfpatch.patching.registering.installed import Package, offers

NOT_PATCHES = {"__init__", "architecture"}


@dataclass(frozen=True)
class Entry:
    """A patch in the registry.

    Attributes:
        id: Its id.
        patch: Its declaration.
        file: Its file; for a `Patch` that was registered by hand, where its condition was written.
        sections: The file's docstring by heading; empty for a `Patch` that was registered by hand.
        package: The installed package that it belongs to; None for hfpatch's own and for those registered by hand.
        registered: True if it was registered by hand.
    """

    id: str
    patch: Patch
    file: Path
    sections: dict[str, str]
    package: Package | None = None
    registered: bool = False

    @property
    def origin(self) -> str:
        """Name and version of its package, or `registered by hand`; empty for hfpatch's own."""
        return str(self.package) if self.package else "registered by hand" if self.registered else ""

    @property
    def family(self) -> str:
        """Name of the file's folder: a model family, or `shared`."""
        return self.file.parent.name

    @property
    def digest(self) -> str:
        """Twelve hex digits that identify the code of the patch's file; a word of this process without such a file.

        The file in which the condition of a `Patch` was written may hold other patches.
        """
        return digest_of_file(self.file) if self.sections else unsaved(self.patch)

    @property
    def proved(self) -> tuple[str, ...]:
        """The architectures for which a shipped proof of this patch says so; empty without `serves`."""
        return proved_names(self.file, self.digest) if self.patch.serves else ()

    @property
    def tried(self) -> frozenset[str]:
        """The architectures of which a shipped proof of this patch says anything; empty without `serves`."""
        return frozenset(p.subject.architecture for p in shipped(self.file)) if self.patch.serves else frozenset()

    @property
    def architectures(self) -> tuple[str, ...]:
        """The `model_type`s that it supports: declared, or proved of it and of the patches it needs; `*` for all."""
        needed = [frozenset(get(name).architectures) for name in self.patch.needs]
        names = self.patch.architectures or self.proved
        return tuple(name for name in names if all(served & {ANY, name} for served in needed))

    def serves(self, architecture: str) -> bool:
        """True if the patch supports this `model_type`."""
        names = self.architectures
        return ANY in names or architecture in names

    @property
    def effect(self) -> str:
        """The effect as declared; `decided from the model` where it is a function."""
        return self.patch.effect if isinstance(self.patch.effect, str) else "decided from the model"

    def to_dict(self) -> dict[str, object]:
        """Return the declaration as plain values: an entry of `hfpatch list --json`."""
        return {
            "id": self.id,
            "origin": self.origin,
            "title": self.patch.title,
            "family": self.family,
            "architectures": list(self.architectures),
            "serves": str(self.patch.serves) if self.patch.serves else None,
            "but": {name: getattr(why, "reason", why) for name, why in self.patch.but.items()},
            "effect": self.effect,
            "tolerance": self.patch.tolerance,
            "transformers": self.patch.transformers,
            "fixed_in": self.patch.fixed_in,
            "options": {k: repr(v) for k, v in self.patch.options.items()},
            "repros": [str(case) for case in self.patch.repros],
            "leaves_alone": [str(case) for case in self.patch.leaves_alone],
            "edits": [str(edit) for edit in self.patch.edits],
            "depends_on": [str(where) for where in self.patch.depends_on],
            "sections": self.sections,
        }


def entries() -> dict[str, Entry]:
    """Return hfpatch's own patches and those that were registered by hand, by id.

    A file that does not load gives a warning with file and line.
    """
    found, broken = _discover()
    for error in broken.values():
        warnings.warn(str(error), stacklevel=2)
    return dict(sorted({**found, **_registered}.items()))


def broken() -> dict[str, PatchFileError]:
    """Return the errors of hfpatch's own patch files that do not load, by the id of the patch."""
    return _discover()[1]


def known(patch_id: str) -> Entry | None:
    """Return a patch that this process has loaded; None if there is none of that id. Imports nothing foreign."""
    return _registered.get(patch_id) or _discover()[0].get(patch_id) or _imported.get(patch_id)


def get(patch_id: str) -> Entry:
    """Return a patch by its id. This imports the module of a patch of an installed package.

    Raises:
        UnknownPatchError: No patch has this id; similar names are listed.
        PatchFileError: The patch's file does not load, or several installed packages use the id.
    """
    if (entry := known(patch_id)) is not None:
        return entry
    if patch_id in broken():
        raise broken()[patch_id]
    if patch_id not in offers():
        raise unknown(patch_id, (*entries(), *offers()))
    _imported[patch_id] = entry = _of_package(patch_id)
    return entry


def serving(architecture: str) -> list[Entry]:
    """Return the patches that support a `model_type`: those for all architectures, and those proved for this one."""
    return [entry for entry in entries().values() if entry.serves(architecture)]


def match(pattern: str, also: Iterable[str] = ()) -> list[str]:
    """Return the ids that an id or glob matches, those of installed packages too. Imports nothing foreign.

    Args:
        pattern: The id or glob.
        also: More ids that it may match.

    Raises:
        UnknownPatchError: It matches no patch; similar names are listed.
        PatchFileError: It is the id of a patch whose file does not load.
    """
    ids = sorted({*entries(), *offers(), *also})
    if pattern in broken() and pattern not in ids:
        raise broken()[pattern]
    names = fnmatch.filter(ids, pattern)
    if not names:
        raise unknown(pattern, ids)
    return names


def unknown(name: str, known: Iterable[str]) -> UnknownPatchError:
    """Return the error for a name that matches no patch."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else f"there are: {', '.join(known)}"
    return UnknownPatchError(f"no patch is called {name!r}: {hint}")


def holder(patch_id: str) -> str:
    """Return a few words about who uses an id; empty if nobody does."""
    found, errors = _discover()
    if patch_id in _registered:
        return "a patch that is registered already"
    if patch_id in found or patch_id in errors:
        return "a patch of hfpatch itself"
    return " and ".join(map(str, offers().get(patch_id, ())))


def entry_of(patch: Patch) -> Entry | None:
    """Return the entry with this very declaration that this process has loaded; None if there is none."""
    loaded = (*_registered.values(), *_discover()[0].values(), *_imported.values())
    return next((entry for entry in loaded if entry.patch is patch), None)


def by_hand() -> tuple[str, ...]:
    """Return the ids of the patches that were registered by hand."""
    return tuple(_registered)


def add(entry: Entry) -> None:
    """Add a patch that was registered by hand. Its file may have changed since it was registered before."""
    digest_of_file.cache_clear()
    shipped.cache_clear()
    proved_names.cache_clear()
    _registered[entry.id] = entry


def drop(patch_id: str) -> None:
    """Remove a patch that was registered by hand.

    Raises:
        UnknownPatchError: None of this id was.
    """
    if _registered.pop(patch_id, None) is None:
        there = f"there are: {', '.join(sorted(_registered))}" if _registered else "none is"
        raise UnknownPatchError(f"unregister: no patch called {patch_id!r} was registered by hand; {there}")


_registered: dict[str, Entry] = {}
"""Patches that were registered by hand, in this process."""
_imported: dict[str, Entry] = {}
"""Patches of installed packages that were asked for, in this process."""


def _of_package(patch_id: str) -> Entry:
    offer, *others = offers()[patch_id]
    if others:
        both = " and by ".join(map(str, (offer, *others)))
        raise PatchFileError(f"{patch_id} is offered by {both}: uninstall one of them")
    if offer.fault:
        raise PatchFileError(f"{patch_id} of {offer.package}: {offer.fault}")
    declared = patch_file.by_name(offer.module, whose=f"{patch_id} of {offer.package}: ")
    return Entry(patch_id, declared.patch, declared.file, declared.sections, package=offer.package)


@cache
def _discover() -> tuple[dict[str, Entry], dict[str, PatchFileError]]:
    found: dict[str, Entry] = {}
    errors: dict[str, PatchFileError] = {}
    for module_name, file in _modules():
        patch_id = file.stem.replace("_", "-")
        try:
            if patch_id in found:
                raise PatchFileError(f"{file}: the id {patch_id!r} is taken by {found[patch_id].file}")
            declared = patch_file.by_name(module_name, file)
            found[patch_id] = Entry(patch_id, declared.patch, file, declared.sections)
        except PatchFileError as error:
            errors.setdefault(patch_id, error)
    return dict(sorted(found.items())), errors


def _modules() -> Iterator[tuple[str, Path]]:
    for folder in patches.__path__:
        yield from _files("hfpatch.patches", Path(folder))


def _files(package: str, folder: Path) -> Iterator[tuple[str, Path]]:
    for file in sorted(folder.rglob("*.py")):
        if file.stem not in NOT_PATCHES:
            yield ".".join((package, *file.relative_to(folder).with_suffix("").parts)), file
