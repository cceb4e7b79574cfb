"""JSON that hfpatch writes beside a checkpoint: with a schema and a checksum, read strictly."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from hfpatch.errors import InputError
from hfpatch.untrusted.ordinary import parsed_json


def sealed(content: Any, schema: int, name: str) -> str:
    """Return the text of a file: the schema, the content under its name, and its checksum."""
    return json.dumps({"schema": schema, "checksum": checksum(content), name: content}, indent=0) + "\n"


def unsealed(raw: bytes, schema: int, name: str) -> Any:
    """Return the content of a file that `sealed` made. Its parts may still be of any type.

    Raises:
        InputError: It is not strict JSON, a newer hfpatch wrote it, or it was edited or is damaged.
        KeyError, TypeError: It is not such a file.
    """
    whole = parsed_json(raw, strict=True)
    found = whole["schema"]
    if type(found) is int and found > schema:
        raise InputError(f"a newer hfpatch wrote it (schema {found}, known here is {schema})")
    content = whole[name]
    if type(found) is not int or found != schema or whole["checksum"] != checksum(content):
        raise InputError("it was edited or is damaged")
    return content


def checksum(content: Any) -> str:
    """Return hex digits that identify JSON values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
