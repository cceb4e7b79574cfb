"""A table as data, rendered as text or HTML; lines on stderr."""

from __future__ import annotations

import html
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass

# Colours of decisions and verdicts, the same in every table.
STYLES = {
    "applied": "bold green",
    "not needed": "dim",
    "opt-in": "yellow",
    "refused": "red",
    "passed": "green",
    "failed": "bold red",
    "starts here": "bold red",
    "not finite": "red",
}


@dataclass(frozen=True)
class Sheet:
    """Rows under headings, with a title above and notes below; every cell is text.

    A cell that is a key of `STYLES` is coloured in a terminal. The columns named in `wide` share the free width and are
    wrapped; the others are never wrapped.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()

    def to_text(self, width: int | None = None) -> str:
        """Return the table as text, in colour if stdout is a terminal.

        Args:
            width: Width in characters; None for that of the terminal, of `COLUMNS`, or 100.
        """
        import io

        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        tty = sys.stdout.isatty()
        if width is None and not tty and "COLUMNS" not in os.environ:
            width = 100
        out = io.StringIO()
        console = Console(
            file=out,
            width=width,
            force_terminal=tty,
            no_color=None if tty else True,
            highlight=False,
            emoji=False,
            legacy_windows=False,
        )
        if self.title:
            console.print(Text(self.title, style="bold"), soft_wrap=False)
        if self.rows:
            table = Table(box=None, pad_edge=False, show_header=any(self.columns), header_style="bold")
            for name in self.columns:
                folds = name in self.wide
                table.add_column(name, overflow="fold", ratio=1 if folds else None, no_wrap=not folds)
            for row in self.rows:
                table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
            console.print(table)
        for note in self.notes:
            console.print(Text(note))
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        return self.to_html()

    def to_html(self) -> str:
        """Return the table as HTML for a notebook, with every cell escaped."""
        cell = '<td style="text-align:left;vertical-align:top;white-space:pre-wrap">'
        head = "".join(f'<th style="text-align:left">{html.escape(name)}</th>' for name in self.columns)
        body = "".join(
            "<tr>" + "".join(f"{cell}{html.escape(text)}</td>" for text in row) + "</tr>" for row in self.rows
        )
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return (
            f"<div><p><b>{html.escape(self.title)}</b></p>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}</div>"
        )


def say(lines: Iterable[str]) -> None:
    """Write lines to stderr; in a distributed run only on rank 0."""
    if rank() != 0:
        return
    for line in lines:
        print(line, file=sys.stderr)


def rank() -> int:
    """Return the rank of this process: that of torch.distributed if it is initialised, else `RANK`, else 0."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    told = os.environ.get("RANK", "0")
    return int(told) if told.isdigit() else 0
