"""Progress of a long operation on stderr: a bar on a terminal, or a line from time to time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from hfpatch.report.sheet import say


@contextmanager
def progress(title: str, total: int) -> Generator[Callable[[int], None]]:
    """Show a progress bar on stderr inside the context, if stderr is a terminal.

    Args:
        title: Name of the operation.
        total: Total number of steps or bytes.

    Yields:
        A function to call with the number of steps or bytes done since the last call.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)


def patience(title: str, *, first: float = 2.0, every: float = 10.0) -> Callable[[str], None]:
    """Return a function to call often with the current place; it prints a line on stderr from time to time.

    Args:
        title: Name of the operation.
        first: Seconds before the first line, so a short operation prints none.
        every: Seconds between two lines.
    """
    start = time.monotonic()
    due = start + first

    def tick(where: str) -> None:
        nonlocal due
        now = time.monotonic()
        if now >= due:
            due = now + every
            say([f"hfpatch: {title}: {where}, {now - start:.0f} s so far"])

    return tick
