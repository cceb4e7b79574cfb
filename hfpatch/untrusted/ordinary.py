"""Reads files that may be anything: a link to an endless device, a pipe nobody writes to, a terabyte of brackets.

Messages are without the file's name, which the caller puts before them.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from hfpatch.errors import InputError

VALUES = 2**21
"""Largest number of values in a JSON file. One costs up to 250 bytes in memory, and two in the file."""
DEEPEST = 100
"""Deepest nesting of a JSON file."""
UNSAID = 2**20
"""Bytes that are looked for in a file that states no size, as those of /proc do."""
DATA = 128 * 2**20
"""Largest size in bytes of a file beside the weights; the largest tokenizers have some 35 MB."""
READ_WHOLE = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".bpe", ".spm", ".vocab")
"""Endings of the files beside the weights that a loader reads whole."""


def read_ordinary(path: str | Path, most: int, *, beginning: bool = False) -> bytes:
    """Return the content of an ordinary file; links are followed.

    Args:
        path: The file.
        most: Largest size in bytes.
        beginning: Return the first `most` bytes of a larger file.

    Raises:
        FileNotFoundError: There is no such file.
        InputError: It is something else, larger, or cannot be read.
    """
    try:
        _check_kind(Path(path).stat())
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe would wait for a writer
        with os.fdopen(handle, "rb") as file:
            held = os.fstat(handle)
            _check_kind(held)  # it may have been replaced since
            if held.st_size > most and not beginning:
                raise InputError(f"it has {held.st_size:,} bytes, and at most {most:,} are read")
            size = min(most, max(held.st_size, UNSAID))  # as much memory is taken at once
            raw = file.read(size if beginning else size + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(error.errno, error.strerror, str(path)) from error
    except OSError as error:
        raise InputError(f"it cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"its name cannot be one of a file ({error})") from error
    if len(raw) > size:
        raise InputError(f"it has more than {most:,} bytes" if size == most else "it grew while it was read")
    return raw


def read_json(path: str | Path, most: int, *, strict: bool = False) -> Any:
    """Return the value in an ordinary JSON file.

    Args:
        path: The file.
        most: Largest size in bytes.
        strict: Refuse an object that names a key twice, and NaN and infinity, which JSON does not have.

    Raises:
        FileNotFoundError: There is no such file.
        InputError: As for `read_ordinary`, or it is not JSON, nested too deep, or holds too many values.
    """
    return parsed_json(read_ordinary(path, most), strict=strict)


def parsed_json(raw: bytes, *, strict: bool = False) -> Any:
    """Return the value that JSON describes. Its memory is bounded by `VALUES`, its nesting by `DEEPEST`.

    Raises:
        InputError: It is not JSON, nested too deep, or holds too many values.
    """
    if sum(map(raw.count, (b",", b"[", b"{"))) > VALUES:
        raise InputError(f"it holds more than {VALUES:,} values")
    try:
        text = raw.decode("utf-8")
        value: Any = (
            json.loads(text, object_pairs_hook=_once, parse_constant=_no_number) if strict else json.loads(text)
        )
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}: {error.msg.removesuffix(' at')}"
        raise InputError(f"it is not valid JSON ({at if error.doc else 'it is empty'})") from error
    except UnicodeDecodeError as error:
        raise InputError("it is not text") from error
    except RecursionError as error:
        raise InputError("it is nested too deep") from error
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError("it holds a number of thousands of digits") from error
    level = [value]
    for _ in range(DEEPEST):
        level = [part for held in level for part in _inside(held)]
    if level:
        raise InputError("it is nested too deep")
    return value


def check_folder(folder: Path) -> None:
    """Raise if a folder holds anything that a loader would wait for, or that would fill the memory.

    Raises:
        InputError: An entry is neither a file nor a directory, or a file beside the weights is too large; the message
            has its name.
    """
    try:
        held = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise InputError(f"it cannot be read ({error.strerror or error})") from error
    for entry in held:
        try:
            found = entry.stat()
        except OSError:  # a link to nothing, which a loader does not find either
            continue
        if not stat.S_ISDIR(found.st_mode):
            try:
                _check_kind(found)
            except InputError as error:
                raise InputError(f"{entry.name} in it cannot be used: {error}") from error
            if found.st_size > DATA and entry.name.endswith(READ_WHOLE):
                raise InputError(
                    f"{entry.name} in it has {found.st_size:,} bytes, and at most {DATA:,} are read; move it elsewhere"
                )


def brief(name: str) -> str:
    """Return a name from a file that is safe to print: on one line, without control characters, shortened."""
    name = name if name.isprintable() and name else ascii(name)
    return name if len(name) <= 120 else f"{name[:80]}...{name[-30:]}"


def _check_kind(found: os.stat_result) -> None:
    mode = found.st_mode
    if stat.S_ISREG(mode):
        return
    kinds = {"a directory": stat.S_ISDIR, "a pipe": stat.S_ISFIFO, "a device": stat.S_ISCHR, "a socket": stat.S_ISSOCK}
    kind = next((name for name, fits in kinds.items() if fits(mode)), "a device")
    raise InputError(f"it is not an ordinary file but {kind}")


def _inside(value: Any) -> Iterator[Any]:
    """Yield the objects and arrays in one."""
    if isinstance(value, (dict, list)):
        yield from (v for v in (value.values() if isinstance(value, dict) else value) if isinstance(v, (dict, list)))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise InputError(f"it names {brief(again)} twice")
    return found


def _no_number(word: str) -> NoReturn:
    raise InputError(f"it holds {word}, which is no number in JSON")
