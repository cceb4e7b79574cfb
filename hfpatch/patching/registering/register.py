"""`hfpatch.register` and `hfpatch.unregister`: patches that a user adds by hand, in this process."""

from __future__ import annotations

import os
from pathlib import Path

from hfpatch.errors import InputError
from hfpatch.given import TEXT, Kind, optional, want
from hfpatch.patching import registry
from hfpatch.patching.language import Patch
from hfpatch.patching.registering.installed import valid
from hfpatch.patching.registering.patch_file import by_path
from hfpatch.patching.registry import Entry
from hfpatch.untrusted.ordinary import brief

PATCH = Kind("a Patch or the path of a patch file", lambda v: isinstance(v, (Patch, str, os.PathLike)))


def register(patch: Patch | str | os.PathLike[str], *, id: str | None = None) -> str:  # noqa: A002 - as in `Entry`
    """Add a patch to the registry of this process. From then on it is run as if it were one of hfpatch's own.

        PATCH = Patch(title="A soft cap on the logits", ...)
        hfpatch.register(PATCH, id="logit-cap")
        hfpatch.apply(model, only="logit-cap")

    Args:
        patch: A `Patch`, or the path of a file that defines `PATCH`; the file is run.
        id: Its id. None for the stem of the file with hyphens; a `Patch` has no stem, so it needs an id.

    Returns:
        The id.

    Raises:
        InputError: There is no such file, the id is malformed or in use, or a `Patch` comes without an id.
        PatchFileError: The file does not load; the message gives file and line.
    """
    want("register", patch=(patch, PATCH), id=(id, optional(TEXT)))
    file = None if isinstance(patch, Patch) else Path(patch).expanduser()
    if file is not None and not _is_file(file):
        named = brief(str(file))
        raise InputError(f"register: there is no file {named!r}; give a patch file, as `hfpatch new` writes one")
    name = _checked(id if id is not None or file is None else file.stem.replace("_", "-"))
    if isinstance(patch, Patch):
        entry = Entry(name, patch, _file_of(patch), {}, registered=True)
    else:
        module = f"hfpatch_registered_{name.replace('-', '_').replace('.', '_')}"
        declared = by_path(module, Path(patch).expanduser().resolve())
        entry = Entry(name, declared.patch, declared.file, declared.sections, registered=True)
    registry.add(entry)
    return name


def unregister(id: str) -> None:  # noqa: A002 - as in `Entry`
    """Remove a patch from the registry of this process. Models that carry it keep it, and can be reverted.

    Args:
        id: Its id, as `register` returned it.

    Raises:
        UnknownPatchError: No patch of this id was registered.
    """
    want("unregister", id=(id, TEXT))
    registry.drop(id)


def _checked(name: str | None) -> str:
    if name is None:
        raise InputError("register: a Patch has no name of its own; give id=, e.g. id='logit-cap'")
    if not valid(name):
        raise InputError(f"register: {name!r} cannot be the id of a patch; want letters, digits and hyphens")
    if taken := registry.holder(name):
        again = f"; call hfpatch.unregister({name!r}) first" if name in registry.by_hand() else "; give another id="
        raise InputError(f"register: the id {name!r} is that of {taken}{again}")
    return name


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or no text
        return False


def _file_of(patch: Patch) -> Path:
    """Return the file, or the notebook cell, in which the condition of a patch was written."""
    code = getattr(patch.condition, "__code__", None)
    return Path(code.co_filename if code is not None else "<unknown>")
