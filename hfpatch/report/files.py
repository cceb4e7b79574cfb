"""Files written at once or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
import sys
from pathlib import Path
from typing import BinaryIO

from hfpatch.errors import InputError

if sys.platform != "win32":
    import fcntl


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a file so that readers see the old file or the new one, also after a crash or a SIGKILL.

    It is written without a name where the file system allows that, then gets a temporary one for the moment of the
    rename. The temporary name is always the same, so a later write removes one that a killed process left. Links are
    followed, and the permissions of a replaced file are kept. A path that is not a regular file (a pipe, `/dev/stdout`)
    is written to directly. Text is encoded as UTF-8.

    Raises:
        InputError: The directory is missing, or the file cannot be written; an existing regular file is unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    target = Path(path)
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
        else:
            _replace(target.resolve(), data)
    except OSError as error:
        raise InputError(f"cannot write {path}: {_reason(target, error)}") from error


def _replace(target: Path, data: bytes) -> None:
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    if sys.platform == "win32":  # no locks and no names relative to a directory: a killed process leaves its file
        temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            temporary.write_bytes(data)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        return
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        name = _temporary_name(directory, target)
        try:
            if not _write_unnamed(directory, name, target, data, mode):
                _write_named(directory, name, data, mode)
            os.rename(name, target.name, src_dir_fd=directory, dst_dir_fd=directory)
        finally:
            _remove(directory, name)
    finally:
        os.close(directory)


def _temporary_name(directory: int, target: Path) -> str:
    """Return the name to write under: always the same for a target, so what a killed process left is removed here.

    Where another process writes in this directory now, or it cannot be locked, a name that nobody else has.
    """
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the directory is closed
    except OSError:
        return f".{secrets.token_hex(8)}.tmp"
    name = f".{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]}.tmp"
    _remove(directory, name)
    return name


def _write_unnamed(directory: int, name: str, target: Path, data: bytes, mode: int | None) -> bool:
    """Write a file that has no name, then give it one; False if the system cannot, and nothing is left."""
    if not hasattr(os, "O_TMPFILE"):
        return False
    try:
        # not tempfile, whose files only their owner can read: here the umask applies, as for any new file
        handle = os.open(target.parent, os.O_WRONLY | os.O_TMPFILE, 0o666)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            return False
        raise
    with os.fdopen(handle, "wb") as file:
        _fill(file, data, mode)
        try:
            os.link(f"/proc/self/fd/{handle}", name, dst_dir_fd=directory, follow_symlinks=True)
        except OSError:  # no /proc
            return False
    return True


def _write_named(directory: int, name: str, data: bytes, mode: int | None) -> None:
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=directory)
    with os.fdopen(handle, "wb") as file:
        _fill(file, data, mode)


def _fill(file: BinaryIO, data: bytes, mode: int | None) -> None:
    if mode is not None:
        os.fchmod(file.fileno(), mode)
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _remove(directory: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)


def _reason(target: Path, error: OSError) -> str:
    directory = target.absolute().parent
    match error:
        case IsADirectoryError():
            return "it is a directory; name a file in it"
        case FileNotFoundError():
            return f"there is no directory {directory}; make it, or name another one"
        case NotADirectoryError():
            return f"{directory} is not a directory; name another one"
        case PermissionError():
            return f"no permission to write in {directory}; name another directory"
        case _:
            return f"{error.strerror or error}; an existing file is unchanged"
