"""Runs the code of a page and writes what it prints into it: `python -m docs.running docs/symptoms.md`.

Under a heading, each `python` block is run with the names of those above it, and each line `hfpatch ...` of a `sh`
block as if it was typed. A section has an empty folder as its working directory. The block `text printed` after one of
these holds what it printed; an error that it raised is the last line, as in a console. Other blocks are not run.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
import warnings
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

BLOCK = re.compile(r"^```(\w*)( printed)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^##? (.+)$", re.MULTILINE)
ROOT = Path(__file__).parent.parent
WIDTH = "100"
PROGRAM = "hfpatch"
RUN = ("python", "sh")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: What follows the fence.
        code: Its text.
        line: The line of the page in which the text begins.
        printed: The text of the block of output after it; None if there is none.
        place: Where that text stands in the page.
    """

    language: str
    code: str
    line: int
    printed: str | None = None
    place: tuple[int, int] = (0, 0)


def sections(page: str) -> dict[str, list[Block]]:
    """Return the blocks to run by the heading above them, `#` or `##`; sections without one are left out."""
    fenced = [m.span() for m in BLOCK.finditer(page)]
    heads = [m for m in HEADING.finditer(page) if not any(a <= m.start() < b for a, b in fenced)]
    found: dict[str, list[Block]] = {}
    for match in BLOCK.finditer(page):
        heading = next((m[1] for m in reversed(heads) if m.start() < match.start()), "")
        blocks = found.setdefault(heading, [])
        if match[2]:
            before = blocks.pop()
            blocks.append(Block(before.language, before.code, before.line, match[3], match.span(3)))
        elif match[1] in RUN:
            blocks.append(Block(match[1], match[3], page[: match.start(3)].count("\n") + 1))
    return {heading: blocks for heading, blocks in found.items() if blocks}


def run(blocks: list[Block], given: Mapping[str, Any] | None = None, page: str = "page") -> Iterator[tuple[Block, str]]:
    """Run the blocks of a section and yield each with what it printed.

    Args:
        blocks: From `sections`.
        given: Names that the code may use and does not make.
        page: Name of the page, for tracebacks.

    Raises:
        Exception: What a block raises that no block of output follows.
    """
    names: dict[str, Any] = {"__name__": "__main__", **(given or {})}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), _plain():
        for block in blocks:
            with _captured() as out:
                try:
                    _run(block, names, page)
                except Exception as error:
                    if block.printed is None:
                        raise
                    print(f"{type(error).__name__}: {error}")
            yield block, "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


def _run(block: Block, names: dict[str, Any], page: str) -> None:
    if block.language == "python":
        exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), names)  # noqa: S102 - the page's own lines
        return
    for line in block.code.splitlines():
        program, *words = shlex.split(line, comments=True) or [""]
        if program == PROGRAM:
            _command(words)
        elif program:
            raise ValueError(f"{page}:{block.line}: a block of sh holds {PROGRAM!r} commands only, not {program!r}")


def _command(words: list[str]) -> None:
    from hfpatch.cli import main

    with mock.patch.object(sys, "argv", [PROGRAM, *words]), contextlib.suppress(SystemExit):
        main()


@contextlib.contextmanager
def _captured() -> Generator[io.StringIO]:
    """Both streams, as a terminal shows them."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        yield out


@contextlib.contextmanager
def _plain() -> Generator[None]:
    """The same output everywhere: one width, one thread, nothing of transformers' own, no network."""
    import torch
    import transformers
    from huggingface_hub import constants

    said, threads = transformers.logging.get_verbosity(), torch.get_num_threads()
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    try:
        with (
            mock.patch.dict(os.environ, {"COLUMNS": WIDTH}),
            mock.patch.object(constants, "HF_HUB_OFFLINE", new=True),
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = _show_warning
            torch.manual_seed(0)
            yield
    finally:
        transformers.logging.set_verbosity(said)
        torch.set_num_threads(threads)
        if bars:
            transformers.utils.logging.enable_progress_bar()


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """Without the file, which stands elsewhere on each machine."""
    print(f"{category.__name__}: {message}", file=sys.stderr)


def filled(page: str, given: Mapping[str, Any] | None = None, name: str = "page") -> str:
    """Return the page with what its code prints now."""
    ran = [pair for blocks in sections(page).values() for pair in run(blocks, given, name)]
    for block, printed in reversed(ran):
        if block.printed is not None:
            start, end = block.place
            page = f"{page[:start]}{printed}\n{page[end:]}"
    return page


def stable(printed: str) -> str:
    """Return a text without what differs between machines: figures, and how columns are spaced."""
    return re.sub(r"\s+", " ", re.sub(r"(?<![\w.])-?\d[\d,]*(\.\d+)?(e[+-]?\d+)?", "#", printed)).strip()


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        file = Path(argument).resolve()
        file.write_text(filled(file.read_text(), name=argument))
