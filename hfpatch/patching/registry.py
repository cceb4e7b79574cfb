"""Finds the patches: those in `patches/`, and other packages' through the entry point group `hfpatch.patches`.

There is no list to maintain: a file that defines `PATCH` is a patch.
An entry point names a module that defines `PATCH`, or a package whose files do.
"""

from __future__ import annotations

import difflib
import fnmatch
import importlib
import importlib.util
import inspect
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from hfpatch import patches
from hfpatch.errors import PatchFileError, UnknownPatchError
from hfpatch.patching.language import ANY, HEADINGS, Patch
from hfpatch.patching.proofs.proof import digest_of_file
from hfpatch.patching.proofs.shelf import proved_names, shipped

GROUP = "hfpatch.patches"
NOT_PATCHES = {"__init__", "architecture"}


@dataclass(frozen=True)
class Entry:
    """A patch in the registry: its id, its declaration and its file."""

    id: str
    patch: Patch
    file: Path
    sections: dict[str, str]
    """The file's docstring by heading."""

    @property
    def family(self) -> str:
        """Name of the file's folder: a model family, or `shared`."""
        return self.file.parent.name

    @property
    def digest(self) -> str:
        """Twelve hex digits that identify the code of the patch's file."""
        return digest_of_file(self.file)

    @property
    def proved(self) -> tuple[str, ...]:
        """The architectures for which a shipped proof of this patch says so; empty without `serves`."""
        return proved_names(self.file) if self.patch.serves else ()

    @property
    def tried(self) -> frozenset[str]:
        """The architectures of which a shipped proof of this patch says anything; empty without `serves`."""
        return frozenset(p.subject.architecture for p in shipped(self.file)) if self.patch.serves else frozenset()

    @property
    def architectures(self) -> tuple[str, ...]:
        """The `model_type`s that the patch supports: declared or proved; `*` for all."""
        return self.patch.architectures or self.proved

    def serves(self, architecture: str) -> bool:
        """True if the patch supports this `model_type`."""
        return ANY in self.architectures or architecture in self.architectures

    @property
    def effect(self) -> str:
        """The effect as declared; `decided from the model` where it is a function."""
        return self.patch.effect if isinstance(self.patch.effect, str) else "decided from the model"

    def to_dict(self) -> dict[str, object]:
        """Return the declaration as plain values: an entry of `hfpatch list --json`."""
        return {
            "id": self.id,
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
    """Return every patch that loads, by id. A file that does not load gives a warning with file and line."""
    found, broken = _discover()
    for error in broken.values():
        warnings.warn(str(error), stacklevel=2)
    return found


def broken() -> dict[str, PatchFileError]:
    """Return the errors of patch files that do not load, by the id of the patch."""
    return _discover()[1]


def get(patch_id: str) -> Entry:
    """Return a patch by its id.

    Raises:
        UnknownPatchError: No patch has this id; similar names are listed.
        PatchFileError: The patch's file does not load.
    """
    found, errors = _discover()
    if patch_id in errors:
        raise errors[patch_id]
    if patch_id not in found:
        raise unknown(patch_id, found)
    return found[patch_id]


def serving(architecture: str) -> list[Entry]:
    """Return the patches that support a `model_type`: those for all architectures, and those proved for this one."""
    return [entry for entry in entries().values() if entry.serves(architecture)]


def match(pattern: str) -> list[str]:
    """Return the ids that an id or glob matches.

    Raises:
        UnknownPatchError: It matches no patch; similar names are listed.
        PatchFileError: It is the id of a patch whose file does not load.
    """
    found, errors = _discover()
    if pattern in errors:
        raise errors[pattern]
    names = fnmatch.filter(found, pattern)
    if not names:
        raise unknown(pattern, found)
    return names


def unknown(name: str, known: Iterable[str]) -> UnknownPatchError:
    """Return the error for a name that matches no patch."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else f"there are: {', '.join(known)}"
    return UnknownPatchError(f"no patch is called {name!r}: {hint}")


@cache
def _discover() -> tuple[dict[str, Entry], dict[str, PatchFileError]]:
    found: dict[str, Entry] = {}
    errors: dict[str, PatchFileError] = {}
    for module_name, file in _modules():
        patch_id = file.stem.replace("_", "-")
        try:
            if patch_id in found:
                raise PatchFileError(f"{file}: the id {patch_id!r} is taken by {found[patch_id].file}")
            found[patch_id] = _load(module_name, file, patch_id)
        except PatchFileError as error:
            errors.setdefault(patch_id, error)
    return dict(sorted(found.items())), errors


def _modules() -> Iterator[tuple[str, Path]]:
    for folder in patches.__path__:
        yield from _files("hfpatch.patches", Path(folder))
    for point in metadata.entry_points(group=GROUP):
        try:
            spec = importlib.util.find_spec(point.value)
        except ImportError:
            spec = None
        if spec is None:
            warnings.warn(f"entry point {point.name} = {point.value}: module not found", stacklevel=4)
        elif spec.submodule_search_locations:
            for folder in spec.submodule_search_locations:
                yield from _files(point.value, Path(folder))
        elif spec.origin:
            yield point.value, Path(spec.origin)


def _files(package: str, folder: Path) -> Iterator[tuple[str, Path]]:
    for file in sorted(folder.rglob("*.py")):
        if file.stem not in NOT_PATCHES:
            yield ".".join((package, *file.relative_to(folder).with_suffix("").parts)), file


def _load(module_name: str, file: Path, patch_id: str) -> Entry:
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        sys.modules.pop(module_name, None)
        raise PatchFileError(f"{_where(error, file)}: {type(error).__name__}: {_first_line(error)}") from error
    patch = getattr(module, "PATCH", None)
    if not isinstance(patch, Patch):
        raise PatchFileError(f"{file}:1: the file defines no PATCH = Patch(...)")
    return Entry(patch_id, patch, file, _sections(inspect.getdoc(module) or "", file))


def _reflow(text: str) -> str:
    """Return a text with each paragraph on one line, to be wrapped to a width later."""
    return "\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))


def _where(error: BaseException, file: Path) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename or file}:{error.lineno or 1}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == file]
    return f"{file}:{lines[-1] if lines else 1}"


def _first_line(error: BaseException) -> str:
    return (error.msg if isinstance(error, SyntaxError) else str(error)).splitlines()[0] if str(error) else ""


def _sections(doc: str, file: Path) -> dict[str, str]:
    parts = doc.split("\n## ")
    sections = {"": parts[0].strip()}
    for part in parts[1:]:
        heading, _, text = part.partition("\n")
        sections[heading.strip()] = _reflow(text)
    got = tuple(h for h in sections if h)
    if got != HEADINGS:
        raise PatchFileError(f"{file}:1: docstring headings are {got}, want {HEADINGS}")
    return sections
