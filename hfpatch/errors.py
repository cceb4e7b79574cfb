"""Everything hfpatch raises.

    HfpatchError
    ├── InputError              what the caller named cannot be used; nothing was changed
    │   ├── NotAModelError      the object holds no torch module
    │   ├── ModelNotFoundError  no model under that name, directory or config
    │   ├── UnknownPatchError   no patch of that name
    │   └── NoEmbeddingError    no token embedding, or more than one to choose from
    ├── PatchFileError          a patch file cannot be loaded (file and line)
    ├── RefusedError            a patch that was asked for by name does not go with this model
    ├── ConflictError           two patches want different things of the same place
    ├── StalePlanError          the model is not as it was when the plan was made
    ├── ApplyError              an edit failed; those before it were undone
    ├── RevertError             something stands in the way of an undo
    └── GuardStop               training cannot go on as it is; carries the history

Each message says what was asked, what was found and where, and what to do next.
"""

from __future__ import annotations

from typing import Any, ClassVar


class HfpatchError(Exception):
    """Root of what hfpatch raises. `code` names its kind, for scripts: a key of `hfpatch.codes.ERRORS`."""

    code: ClassVar[str] = "error"


class InputError(HfpatchError, ValueError):
    """What the caller named cannot be used; nothing was changed."""

    code = "bad-input"


class NotAModelError(InputError, TypeError):
    """The object passed holds no torch module."""

    code = "not-a-model"


class ModelNotFoundError(InputError):
    """No model under that name, directory or config file."""

    code = "no-such-model"


class UnknownPatchError(InputError, KeyError):
    """No patch of that name."""

    code = "unknown-patch"

    __str__ = Exception.__str__  # KeyError would print the repr of the sentence


class NoEmbeddingError(InputError, LookupError):
    """No token embedding to call, or several and none named."""

    code = "no-embedding"


class PatchFileError(HfpatchError):
    """A patch file cannot be loaded; the sentence names file and line."""

    code = "broken-patch-file"


class RefusedError(HfpatchError):
    """A patch that was asked for by name does not go with this model."""

    code = "refused"


class ConflictError(HfpatchError):
    """Two patches want different things of the same place."""

    code = "conflict"


class StalePlanError(HfpatchError):
    """The model is not as it was when the plan was made; nothing was changed."""

    code = "stale-plan"


class ApplyError(HfpatchError):
    """An edit failed; those before it were undone."""

    code = "not-applied"


class RevertError(HfpatchError):
    """Something stands in the way of an undo."""

    code = "not-reverted"


class GuardStop(HfpatchError):  # noqa: N818 - a decision, as StopIteration is
    """Training cannot go on as it is.

    Attributes:
        history: The last judged steps that were skipped, oldest first (`hfpatch.guarding.outcome.Facts`).
    """

    code = "guard-stop"

    def __init__(self, message: str, history: tuple[Any, ...] = ()) -> None:
        super().__init__(message, history)
        self.history = history

    def __str__(self) -> str:
        return str(self.args[0])
