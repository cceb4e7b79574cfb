"""A proof as data: what it is about, and what came of it. Imports neither torch nor transformers."""

from __future__ import annotations

import ast
import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

Outcome = Literal["proved", "not cured", "harmless", "untried"]

OUTCOMES: dict[Outcome, str] = {
    "proved": "the fault showed without the patch and not with it, and healthy weights compute what the patch states",
    "not cured": "the fault showed with the patch too, or healthy weights compute something else",
    "harmless": "the run showed that this fault cannot occur",
    "untried": "no tiny model could be built, or the fault could not be produced in it",
}
"""Outcome -> what it means."""


@dataclass(frozen=True)
class Subject:
    """What a proof is about.

    Attributes:
        patch: Digest of the patch's file, without docstrings; a word of this process for a patch in no file.
        architecture: `config.model_type`.
        flags: Values of the config that the layers read and that differ in kind from the tiny config's, as JSON.
        bodies: Digests of the methods of transformers that the patch depends on.
        torch: Release of torch.
        transformers: Release of transformers.
    """

    patch: str
    architecture: str
    flags: str
    bodies: frozenset[str]
    torch: str
    transformers: str

    @property
    def settings(self) -> dict[str, Any]:
        """The flags as values."""
        return json.loads(self.flags)

    @property
    def name(self) -> str:
        """The architecture with its flags, for people."""
        flags = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.architecture} ({flags})" if flags else self.architecture

    @property
    def key(self) -> str:
        """Hex digits that identify the subject: the name of its file in the cache."""
        return hashlib.sha256(json.dumps(_plain(self), sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Proof:
    """What came of the repros of a patch on a subject.

    Attributes:
        subject: What was tried. Its bodies are all those of the tiny model.
        outcome: A key of `OUTCOMES`.
        text: A sentence about the run.
    """

    subject: Subject
    outcome: Outcome
    text: str

    def covers(self, subject: Subject) -> bool:
        """True if this proof is about the subject: the same patch, config and releases, and no body beyond its own."""
        mine = self.subject
        return subject.bodies <= mine.bodies and all(
            getattr(mine, name) == getattr(subject, name)
            for name in ("patch", "architecture", "flags", "torch", "transformers")
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the proof as plain values, for JSON."""
        return _plain(self.subject) | {"outcome": self.outcome, "text": self.text}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Proof:
        """Return the proof that `to_dict` made plain.

        Raises:
            KeyError, TypeError, ValueError: A value is missing or of another type.
        """
        words = {key: str(values[key]) for key in ("patch", "architecture", "torch", "transformers", "text")}
        outcome = values["outcome"]
        if outcome not in get_args(Outcome):
            raise ValueError(f"outcome {outcome!r}: want one of {', '.join(OUTCOMES)}")
        flags: Any = values.get("flags", {})
        bodies = frozenset(map(str, values["bodies"]))
        text = words.pop("text")
        return Proof(Subject(**words, flags=json.dumps(flags, sort_keys=True), bodies=bodies), outcome, text)


def _plain(subject: Subject) -> dict[str, Any]:
    values = asdict(subject) | {"flags": subject.settings, "bodies": sorted(subject.bodies)}
    return values if values["flags"] else {key: value for key, value in values.items() if key != "flags"}


_SESSION = f"unsaved-{secrets.token_hex(6)}"
_UNSAVED: dict[int, object] = {}
"""Id -> patch in no file. They are kept, so that no later patch gets the id, and with it the proofs, of one of them."""


def unsaved(patch: object) -> str:
    """Return what stands for the digest of a patch that is in no file: a notebook's. No other process has it."""
    _UNSAVED[id(patch)] = patch
    return f"{_SESSION}-{id(patch):x}"


def unreadable(function: object) -> str:
    """Return what stands for the digest of a function without source. No other process has it."""
    return f"{_SESSION}-{id(function):x}"


def is_unsaved(word: str) -> bool:
    """True for a word that `unsaved` or `unreadable` returned, in any process."""
    return word.startswith("unsaved-")


def is_saved(subject: Subject) -> bool:
    """True if the patch and all bodies have sources, so that a proof of them means something to another process."""
    return not any(map(is_unsaved, (subject.patch, *subject.bodies)))


@cache
def digest_of_file(file: Path) -> str:
    """Return twelve hex digits that identify the code of a patch's file, without docstrings and layout."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:12]
