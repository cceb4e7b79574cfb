"""Atomic writes of files."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from hfpatch.errors import InputError


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a file under a temporary name and rename it: readers see the old file or the new one, also after a crash.

    Links are followed, and the permissions of a replaced file are kept. A path that is not a regular file (a pipe,
    `/dev/stdout`) is written to directly. Text is encoded as UTF-8.

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
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    # not tempfile, whose files only their owner can read: here the umask applies, as for any new file
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            if mode is not None:
                temporary.chmod(mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


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
