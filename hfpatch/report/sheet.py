"""A table as data, rendered as text or HTML; lines for the user; the face of what public functions return."""

from __future__ import annotations

import html
import math
import os
import re
import sys
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hfpatch.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

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
CODE = re.compile(r"[=('\"\[]")
"""What a word of a line of code holds."""
GAP = 2
"""Spaces between columns."""


class Shown(ABC):
    """Something that is shown as tables: as text in a terminal, as HTML in a notebook, as JSON to a program.

    A dataclass that is one is made with `repr=False`: its `repr` is its text too.
    """

    __slots__ = ()

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return plain values under stable keys, as JSON can hold them."""

    @abstractmethod
    def sheet(self) -> Sheet:
        """Return it as a table."""

    def sheets(self) -> tuple[Sheet, ...]:
        """Return all of its tables, where there are several."""
        return (self.sheet(),)

    def __str__(self) -> str:
        return "\n\n".join(s.to_text() for s in self.sheets())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return "\n".join(s.to_html() for s in self.sheets())


@dataclass(frozen=True, repr=False)
class Sheet(Shown):
    """Rows under headings, with a title above and notes below; every cell is text, and safe to print.

    A cell that is a key of `STYLES` is coloured in a terminal. The columns named in `wide` share the free width and are
    wrapped; the others are never wrapped. A word of code is never broken, because it is there to be copied: if it does
    not fit beside the other columns it is printed below them, and if it is longer than a line it sticks out. A long
    path in a table is broken only if nothing else helps. In a notebook, the rows numbered in `folded` are behind a line
    to click on, below the others.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()
    folded: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name, value in {
            "title": printable(self.title),
            "rows": tuple(tuple(map(printable, row)) for row in self.rows),
            "notes": tuple(map(printable, self.notes)),
        }.items():
            object.__setattr__(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        """Return title, columns, rows and notes."""
        return {
            "title": self.title,
            "columns": list(self.columns),
            "rows": [list(row) for row in self.rows],
            "notes": list(self.notes),
        }

    def sheet(self) -> Sheet:
        """Return itself."""
        return self

    def to_text(self, width: int | None = None) -> str:
        """Return the table as text, in colour if stdout is a terminal.

        Args:
            width: Width in characters; None for that of the terminal, of `COLUMNS`, or 100.
        """
        import io

        from rich.console import Console

        tty = sys.stdout.isatty()
        if width is None and not tty and "COLUMNS" not in os.environ:
            width = 100
        out = io.StringIO()
        console = Console(
            file=out,
            width=width,
            force_terminal=tty,
            force_jupyter=False,  # else a notebook shows each line twice: by rich, and by `_repr_html_`
            no_color=None if tty else True,
            highlight=False,
            emoji=False,
            legacy_windows=False,
        )
        _lines(console, self.title, style="bold")
        if self.rows:
            widths = self._widths(console.width)
            if widths is not None:
                console.print(self._beside(widths))
            else:
                self._below(console)
        for note in self.notes:
            _lines(console, note)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _widths(self, room: int) -> list[int] | None:
        """Return the width of each column: whole words if they fit, else whole words of code; None if neither do."""
        from rich.cells import cell_len

        cells = [self.columns, *self.rows]
        natural = [
            max(cell_len(line) for row in cells for line in row[i].split("\n")) for i in range(len(self.columns))
        ]
        room -= GAP * (len(natural) - 1)
        for kept in (str.strip, CODE.search):
            words = [[cell_len(w) for row in cells for w in row[i].split() if kept(w)] for i in range(len(natural))]
            least = [
                max(found, default=1) if name in self.wide else wide
                for name, wide, found in zip(self.columns, natural, words, strict=True)
            ]
            if sum(least) <= room:
                return _shrunk(natural, least, room)
        return None

    def _beside(self, widths: list[int]) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, show_header=any(self.columns), header_style="bold")
        for name, width in zip(self.columns, widths, strict=True):
            table.add_column(name, width=width, overflow="fold", no_wrap=name not in self.wide)
        for row in self.rows:
            table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
        return table

    def _below(self, console: Console) -> None:
        """Write each row as its narrow cells in one line and its wide cells below."""
        from rich.text import Text

        for row in [*([self.columns] if any(self.columns) else []), *self.rows]:
            heading = row is self.columns
            cells = list(zip(self.columns, row, strict=True))
            narrow = [c.replace("\n", ", ") for n, c in cells if n not in self.wide and c]
            if narrow:
                styled = [Text(c, style="bold" if heading else STYLES.get(c, "")) for c in narrow]
                console.print(Text(" " * GAP).join(styled), soft_wrap=True)
            for cell in (c for n, c in cells if n in self.wide and c):
                _lines(console, cell, indent=" " * GAP, style="bold" if heading else "")

    def to_html(self) -> str:
        """Return the table as HTML for a notebook, with every cell escaped."""
        shown = [row for i, row in enumerate(self.rows) if i not in self.folded]
        folded = [row for i, row in enumerate(self.rows) if i in self.folded]
        table = self._html_table(shown) if shown else ""
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        rest = ""
        if folded:
            count = f"{len(folded)}{' more' if shown else ''} row{'' if len(folded) == 1 else 's'}"
            rest = f"<details><summary>{count}</summary>{self._html_table(folded)}</details>"
        return f"<div><p><b>{html.escape(self.title)}</b></p>{table}{notes}{rest}</div>"

    def _html_table(self, rows: Iterable[tuple[str, ...]]) -> str:
        cell = '<td style="text-align:left;vertical-align:top;white-space:pre-wrap">'
        head = "".join(f'<th style="text-align:left">{html.escape(name)}</th>' for name in self.columns)
        body = "".join("<tr>" + "".join(f"{cell}{html.escape(text)}</td>" for text in row) + "</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _shrunk(widths: list[int], least: list[int], room: int) -> list[int]:
    """Return widths that fit, the widest column folded first, none below its least."""
    found = list(widths)
    while sum(found) > room:
        found[max(range(len(found)), key=lambda i: found[i] if found[i] > least[i] else -1)] -= 1
    return found


def _lines(console: Console, text: str, *, indent: str = "", style: str = "") -> None:
    """Write text in lines as wide as the console; a word longer than that is not broken."""
    from rich.text import Text

    for line in text.splitlines():
        folded = textwrap.wrap(
            line,
            console.width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for part in folded or [""]:
            console.print(Text(part, style=style), soft_wrap=True)


def finite(value: float | None) -> float | None:
    """Return a figure as JSON can hold it: None for NaN and the infinities."""
    return value if value is not None and math.isfinite(value) else None


def say(lines: Iterable[str]) -> None:
    """Write lines to stderr, in a notebook to its output; in a distributed run only on rank 0."""
    if rank() != 0:
        return
    notebook = type(sys.stderr).__module__ == "ipykernel.iostream"  # which shows stderr as a red box
    for line in lines:
        print(printable(line), file=sys.stdout if notebook else sys.stderr)


def rank() -> int:
    """Return the rank of this process: that of torch.distributed if it is initialised, else `RANK`, else 0."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    told = os.environ.get("RANK", "0")
    return int(told) if told.isdigit() else 0
