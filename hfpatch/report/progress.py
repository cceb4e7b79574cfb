"""Signs of life on stderr while something long runs: a bar on a terminal, or a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from hfpatch.report.sheet import say


@contextmanager
def progress(title: str, total: int) -> Generator[Callable[[int], None]]:
    """Show how far something is, until the context is left.

    Args:
        title: What runs.
        total: Steps, or bytes, in all.

    Yields:
        A function to call with the number that was done since the last call.
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
    """Return a function to call, often, with where something long is; it says so on stderr now and then.

    Args:
        title: What runs.
        first: Seconds of silence at the start, so that what is short says nothing.
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
