"""Runs the module of a patch and checks it. Whatever its code raises becomes a `PatchFileError` with file and line."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from hfpatch.errors import PatchFileError
from hfpatch.patching.language import HEADINGS, Patch


@dataclass(frozen=True)
class Declared:
    """The contents of a patch file: the declaration, the file, and its docstring by heading."""

    patch: Patch
    file: Path
    sections: dict[str, str]


def by_name(name: str, file: Path | None = None, whose: str = "") -> Declared:
    """Import a module that defines a patch.

    Args:
        name: Name of the module.
        file: Its file; None to look for it, which imports the packages around it.
        whose: Words that errors begin with.

    Raises:
        PatchFileError: It cannot be imported, defines no `PATCH`, or its docstring has other headings.
    """
    if file is None:
        with blamed(name, None, whose):
            spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise PatchFileError(f"{whose}{name}: there is no module of that name")
        file = Path(spec.origin)
    with blamed(name, file, whose):
        module = importlib.import_module(name)
    return _checked(module, file, whose)


def by_path(name: str, file: Path) -> Declared:
    """Run a file that defines a patch, as a module of this name. It is entered in `sys.modules`.

    Raises:
        PatchFileError: It cannot be run, defines no `PATCH`, or its docstring has other headings.
    """
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise PatchFileError(f"{file}: Python cannot import it; want a file that ends in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with blamed(name, file):
            spec.loader.exec_module(module)
        return _checked(module, file)
    except BaseException:
        sys.modules.pop(name, None)
        raise


@contextmanager
def blamed(name: str, file: Path | None, whose: str = "") -> Generator[None]:
    """Turn an error or `SystemExit` of a patch's own code into a `PatchFileError` with file and line.

    Args:
        name: Name of the module, for an error raised where the file is not known.
        file: File of the patch.
        whose: Words before the file: the patch and its package.

    Raises:
        PatchFileError: The code raised something other than KeyboardInterrupt.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        where = _where(error, file) or name
        raise PatchFileError(f"{whose}{where}: {type(error).__name__}: {_first_line(error)}") from error


def _checked(module: ModuleType, file: Path, whose: str = "") -> Declared:
    patch = getattr(module, "PATCH", None)
    if not isinstance(patch, Patch):
        raise PatchFileError(f"{whose}{file}:1: the file defines no PATCH = Patch(...)")
    return Declared(patch, file, _sections(inspect.getdoc(module) or "", f"{whose}{file}"))


def _where(error: BaseException, file: Path | None) -> str:
    """Return file and line of an error: in the file of the patch if it is known, else where other code raised it."""
    if isinstance(error, SyntaxError):
        return f"{error.filename or file}:{error.lineno or 1}"
    frames = traceback.extract_tb(error.__traceback__)
    if file is not None:
        lines = [f.lineno for f in frames if Path(f.filename) == file]
        return f"{file}:{lines[-1] if lines else 1}"
    machinery = (__file__, importlib.__file__, importlib.util.__file__)
    theirs = [f for f in frames if f.filename not in machinery and not f.filename.startswith("<frozen")]
    return f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""


def _first_line(error: BaseException) -> str:
    return (error.msg if isinstance(error, SyntaxError) else str(error)).splitlines()[0] if str(error) else ""


def _sections(doc: str, file: str) -> dict[str, str]:
    parts = doc.split("\n## ")
    sections = {"": parts[0].strip()}
    for part in parts[1:]:
        heading, _, text = part.partition("\n")
        sections[heading.strip()] = _reflow(text)
    got = tuple(h for h in sections if h)
    if got != HEADINGS:
        raise PatchFileError(f"{file}:1: docstring headings are {got}, want {HEADINGS}")
    return sections


def _reflow(text: str) -> str:
    """Return a text with each paragraph on one line, to be wrapped to a width later."""
    return "\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))
