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
    ├── StalePlanError          the model has changed since the plan was made
    ├── ApplyError              an edit failed; the edits before it were undone
    ├── RevertError             an edit cannot be undone
    └── GuardStop               training cannot continue; carries the history

Each message says what was asked, what was found and where, and what to do next.
"""

from __future__ import annotations

from typing import Any, ClassVar

from hfpatch.printable import printable as _printable  # it is no name of this public module


class HfpatchError(Exception):
    """Base class of the exceptions that hfpatch raises. `code` names the kind, for scripts: a key of
    `hfpatch.codes.ERRORS`. The message is one line, whatever names from files it quotes.
    """

    code: ClassVar[str] = "error"

    def __str__(self) -> str:
        return _printable(super().__str__(), lines=False)


class InputError(HfpatchError, ValueError):
    """An argument cannot be used; nothing was changed."""

    code = "bad-input"


class NotAModelError(InputError, TypeError):
    """The object passed holds no torch module."""

    code = "not-a-model"


class ModelNotFoundError(InputError):
    """No model with that name, directory or config file."""

    code = "no-such-model"


class UnknownPatchError(InputError, KeyError):
    """No patch with that name."""

    code = "unknown-patch"

    def __str__(self) -> str:
        return _printable(Exception.__str__(self), lines=False)  # KeyError would print the repr of the sentence


class NoEmbeddingError(InputError, LookupError):
    """No token embedding, or several and none was named."""

    code = "no-embedding"


class PatchFileError(HfpatchError):
    """A patch file cannot be loaded; the message names file and line."""

    code = "broken-patch-file"


class RefusedError(HfpatchError):
    """A patch that was asked for by name does not fit this model."""

    code = "refused"


class ConflictError(HfpatchError):
    """Two patches set different values in the same place."""

    code = "conflict"


class StalePlanError(HfpatchError):
    """The model is not as it was when the plan was made; nothing was changed."""

    code = "stale-plan"


class ApplyError(HfpatchError):
    """An edit failed; the edits before it were undone."""

    code = "not-applied"


class RevertError(HfpatchError):
    """An edit cannot be undone."""

    code = "not-reverted"


class GuardStop(HfpatchError):  # noqa: N818 - a decision, as StopIteration is
    """Training cannot continue.

    Attributes:
        history: The last skipped steps, oldest first (`hfpatch.guarding.outcome.Facts`). Ordinary overflows of the
            loss scale and steps with zero loss and zero gradients are not in it.
    """

    code = "guard-stop"

    def __init__(self, message: str, history: tuple[Any, ...] = ()) -> None:
        super().__init__(message, history)
        self.history = history

    def __str__(self) -> str:
        return _printable(str(self.args[0]))
