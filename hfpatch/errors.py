"""The exceptions that hfpatch raises.

    HfpatchError
    ├── InputError              an argument cannot be used; nothing was changed
    │   ├── NotAModelError      the object holds no torch module
    │   ├── ModelNotFoundError  no model with that name, directory or config
    │   ├── UnknownPatchError   no patch with that name
    │   └── NoEmbeddingError    no token embedding, or several and none was named
    ├── PatchFileError          a patch file cannot be loaded (file and line)
    ├── RefusedError            a patch that was asked for by name does not fit this model
    ├── ConflictError           two patches set different values in the same place
    ├── ApplyError              an edit failed; the edits before it were undone
    ├── RevertError             an edit cannot be undone
    └── GuardStop               training cannot continue; carries the history

Each message says what was asked, what was found and where, and what to do next.
"""

from __future__ import annotations

from typing import Any


class HfpatchError(Exception):
    """Base class of the exceptions that hfpatch raises."""


class InputError(HfpatchError, ValueError):
    """An argument cannot be used; nothing was changed."""


class NotAModelError(InputError, TypeError):
    """The object passed holds no torch module."""


class ModelNotFoundError(InputError):
    """No model with that name, directory or config file."""


class UnknownPatchError(InputError, KeyError):
    """No patch with that name."""

    __str__ = Exception.__str__  # KeyError would print the repr of the sentence


class NoEmbeddingError(InputError, LookupError):
    """No token embedding, or several and none was named."""


class PatchFileError(HfpatchError):
    """A patch file cannot be loaded; the message names file and line."""


class RefusedError(HfpatchError):
    """A patch that was asked for by name does not fit this model."""


class ConflictError(HfpatchError):
    """Two patches set different values in the same place."""


class ApplyError(HfpatchError):
    """An edit failed; the edits before it were undone."""


class RevertError(HfpatchError):
    """An edit cannot be undone."""


class GuardStop(HfpatchError):  # noqa: N818 - a decision, as StopIteration is
    """Training cannot continue.

    Attributes:
        history: The last skipped steps, oldest first (`hfpatch.guarding.outcome.Facts`). Ordinary overflows of the
            loss scale and steps with zero loss and zero gradients are not in it.
    """

    def __init__(self, message: str, history: tuple[Any, ...] = ()) -> None:
        super().__init__(message, history)
        self.history = history

    def __str__(self) -> str:
        return str(self.args[0])
