"""JSON that hfpatch writes beside a checkpoint: with a schema and a checksum, read strictly."""

from __future__ import annotations

import hashlib
import json
from typing import Any, NoReturn

from hfpatch.given import shown
from hfpatch.report.files import UnreadableError


def sealed(content: Any, schema: int, name: str) -> str:
    """Return the text of a file: the schema, the content under its name, and its checksum."""
    return json.dumps({"schema": schema, "checksum": checksum(content), name: content}, indent=0) + "\n"


def unsealed(raw: bytes, schema: int, name: str) -> Any:
    """Return the content of a file that `sealed` made. Its parts may still be of any type.

    Raises:
        UnreadableError: A newer hfpatch wrote it, or it was edited or is damaged.
        ValueError, KeyError, TypeError, RecursionError: It is not JSON, or not such a file; also a key that is there
            twice, or NaN.
    """
    whole = json.loads(raw, object_pairs_hook=_once, parse_constant=_no_number)
    found = whole["schema"]
    if type(found) is int and found > schema:
        raise UnreadableError(f"a newer hfpatch wrote it (schema {found}, known here is {schema})")
    content = whole[name]
    if type(found) is not int or found != schema or whole["checksum"] != checksum(content):
        raise UnreadableError("it was edited or is damaged")
    return content


def checksum(content: Any) -> str:
    """Return hex digits that identify JSON values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {shown(next(n for n in names if names.count(n) > 1))} is there twice")
    return values


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")
