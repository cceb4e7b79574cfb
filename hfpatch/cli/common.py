"""Arguments, options and helpers that the verbs share."""

from __future__ import annotations

import codecs
import io
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfpatch.errors import InputError
from hfpatch.report.sheet import say
from hfpatch.untrusted.ordinary import brief, read_ordinary

if TYPE_CHECKING:
    import torch

    from hfpatch.patching.manifest.file import Manifest

Model = Annotated[str, typer.Argument(help="A hub name, a local directory, or a config.json.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
ComputeDtype = Annotated[str | None, typer.Option(help="Plan for this dtype, e.g. float16.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run the model code in the checkpoint.")]


def show(thing: Any, as_json: bool) -> None:
    """Print a result as text, or its `to_dict()` as JSON."""
    if as_json:
        show_json(thing.to_dict())
    else:
        print(thing)


def show_json(figures: dict[str, Any]) -> None:
    """Print figures as indented JSON."""
    print(json.dumps(figures, indent=2))


def manifest_beside(name: str) -> Manifest | None:
    """Return the manifest beside a checkpoint: in its directory, or in the local hub cache; None if there is none.

    Raises:
        InputError: It cannot be used.
    """
    from huggingface_hub import try_to_load_from_cache

    from hfpatch.patching.manifest.file import FILE, read

    path = Path(name).expanduser()
    if path.exists():
        return read(path if path.is_dir() else path.parent)
    cached = try_to_load_from_cache(name, FILE) if name.count("/") == 1 else None
    return read(Path(cached).parent) if isinstance(cached, str) else None


def broken_patch_files() -> bool:
    """Report each patch file that cannot be loaded, on stderr; True if there is one."""
    from hfpatch.patching import registry

    warnings.simplefilter("ignore")  # the lines below say the same
    errors = registry.broken()
    for error in errors.values():
        print(f"hfpatch: {error}", file=sys.stderr)
    return bool(errors)


def say_missing(names: Sequence[str], whose: str = "") -> None:
    """Say on stderr how many tensors a checkpoint does not hold; nothing if it holds all.

    Args:
        names: Their names.
        whose: The beginning of the line, such as `A, model: `.
    """
    if names:
        say(
            [
                f"hfpatch: {whose}{len(names)} tensors are not in the checkpoint, so random ({names[0]}, ...), "
                "which affects the figures"
            ]
        )


def quiet_transformers() -> None:
    """Turn off transformers' warnings and progress bars, which would mix with the report."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


TEXT = """\
The harbour was quiet when the first boats came back. Two men carried the nets to the wall, while a boy counted the
fish and wrote 1, 12, 37 in a small book. Die Sonne stand tief über dem Wasser. 海は静かだった。 Море было спокойно.
def mean(values):
    return sum(values) / len(values)  # of nothing: ZeroDivisionError
"""
"""The default text: prose, several scripts, numbers and code, to get values as in real use."""

CHARACTERS = 64
"""Bytes read per token, so that a large file is not read completely; few tokens are longer."""
LONGEST_TEXT = 64 * 2**20
"""Largest number of bytes that are read of a text."""


def read_text(file: str | None, tokens: int) -> str:
    """Return text for at least this many tokens, from a file, from stdin for `-`, or the built-in text for None.

    Raises:
        InputError: The file cannot be read, or is not UTF-8.
    """
    if file is None:
        return TEXT
    most = min(CHARACTERS * tokens, LONGEST_TEXT)
    try:
        if file == "-":
            return io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8").read(most)
        raw = read_ordinary(file, most, beginning=True)
        return codecs.getincrementaldecoder("utf-8")().decode(raw, final=len(raw) < most)
    except UnicodeDecodeError as error:
        raise InputError(f"--text {file}: not UTF-8 at byte {error.start:,}; want a text file") from error
    except (FileNotFoundError, InputError) as error:
        why = error if isinstance(error, InputError) else error.strerror
        raise InputError(f"--text {brief(file)}: cannot be read ({why}); want a text file, or - for stdin") from error


def torch_device(name: str | None) -> torch.device:
    """Return the device that an option names; for None, a GPU if there is one, else the CPU.

    Raises:
        InputError: There is no such device here.
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
        raise InputError(
            f"--device {name}: torch finds {count} GPU{'' if count == 1 else 's'} here; name another device"
        )
    return device
