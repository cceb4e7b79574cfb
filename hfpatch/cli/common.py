"""What the verbs share: their common arguments, and the quiet that a report needs."""

from __future__ import annotations

import io
import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfpatch.errors import InputError

if TYPE_CHECKING:
    import torch

Model = Annotated[str, typer.Argument(help="A hub name, a local directory, or a config.json.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
ComputeDtype = Annotated[str | None, typer.Option(help="Plan for this dtype, e.g. float16.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the model code that the checkpoint brings along.")
]


def show(thing: Any, as_json: bool) -> None:
    """Print a result as it prints itself, or its `to_dict()`."""
    if as_json:
        show_json(thing.to_dict())
    else:
        print(thing)


def show_json(figures: dict[str, Any]) -> None:
    """Print figures as JSON, the way every verb does."""
    print(json.dumps(figures, indent=2))


def broken_patch_files() -> bool:
    """Name each patch file that does not load, on stderr; whether there was one."""
    from hfpatch.patching import registry

    warnings.simplefilter("ignore")  # the sentences below say the same
    errors = registry.broken()
    for error in errors.values():
        print(f"hfpatch: {error}", file=sys.stderr)
    return bool(errors)


def quiet_transformers() -> None:
    """Keep transformers' own notices out of the report."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


TEXT = """\
The harbour was quiet when the first boats came back. Two men carried the nets to the wall, while a boy counted the
fish and wrote 1, 12, 37 in a small book. Die Sonne stand tief über dem Wasser. 海は静かだった。 Море было спокойно.
def mean(values):
    return sum(values) / len(values)  # of nothing: ZeroDivisionError
"""
"""Run where no text is named: prose, other scripts, figures and code, so that the values are those of real use."""

CHARACTERS = 64
"""Read for each token asked for, so that a large file is not read whole; few tokens are longer."""


def read_text(file: str | None, tokens: int) -> str:
    """Enough of a file of text for so many tokens, of stdin for `-`, or the text that is built in.

    Raises:
        InputError: It cannot be read.
    """
    if file is None:
        return TEXT
    try:
        if file == "-":
            return io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8").read(CHARACTERS * tokens)
        with Path(file).open(encoding="utf-8") as lines:
            return lines.read(CHARACTERS * tokens)
    except UnicodeDecodeError as error:
        raise InputError(f"--text {file}: not UTF-8 at byte {error.start:,}; want a file of text") from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"--text {file[:80]}: cannot be read ({why}); want a file of text, or - for stdin") from error


def torch_device(name: str | None) -> torch.device:
    """The device that an option names; a GPU if there is one and none is named.

    Raises:
        InputError: No such device here.
    """
    import torch

    count = torch.cuda.device_count()
    if name is None:
        return torch.device("cuda" if count else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise InputError(f"--device {name!r}: want cpu, cuda or one such as cuda:1")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise InputError(f"--device {name}: torch sees {count} GPU{'' if count == 1 else 's'} here")
    return device
