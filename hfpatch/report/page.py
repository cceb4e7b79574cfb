"""A heat map as a page of its own: `page.html`, `page.css` and `page.js` in one."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from hfpatch.report import scale
from hfpatch.report.grid import Grid

if TYPE_CHECKING:
    from jinja2 import Template


HERE = Path(__file__).parent
CHARACTER = 7
"""Pixels that a character of a label needs."""
BESIDE = 410
"""Pixels that a page on a desk needs beside the map: the panel and the margins."""
BADGE = 58
"""Pixels that the words before the first bad row's label need."""


def render(shown: Grid) -> str:
    """The page; its policy allows its own style and script, by hash, and nothing else."""
    style = _asset("page.css") + _generated(shown)
    script = _asset("page.js")
    facts = [
        [[cell.sentence, cell.facts] if (cell := shown.cells.get((r, c))) else None for c in range(len(shown.columns))]
        for r in range(len(shown.rows))
    ]
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return _template().render(
        shown=shown,
        style=style,
        script=script,
        facts=facts,
        policy=policy,
        bands=scale.BANDS,
        bad=sum(cell.bad for cell in shown.cells.values()),
        start=shown.first_bad or next(iter(sorted(shown.cells)), (0, 0)),
    )


def _generated(shown: Grid) -> str:
    """What depends on the map or on `scale`: sizes and colours. A policy by hash allows no style on an element."""
    columns, rows = max(1, len(shown.columns)), max(1, len(shown.rows))
    label = CHARACTER * min(48, max((len(name) for name in shown.rows), default=0)) + 16 + BADGE * bool(shown.first_bad)
    return "\n".join(
        (
            f":root {{ --rows: {rows}; --columns: {columns}; --label: {label}px; }}",
            _colours(scale.LIGHT, scale.LIGHT_BAD),
            "@media (prefers-color-scheme: dark) {",
            _colours(scale.DARK, scale.DARK_BAD),
            "}",
            # the numbers are written into cells only where all columns have room for them
            f"@media (min-width: {label + 46 * columns + BESIDE}px) {{",
            ".map { --cell: 45px; }",
            ".map td i { all: unset; }",
            "}",
            "",
        )
    )


def _colours(colours: tuple[str, ...], bad: str) -> str:
    rules = [f".b{i} {{ background: {c}; color: {scale.ink(c)}; }}" for i, c in enumerate(colours)]
    return "\n".join([*rules, f".bad {{ background: {bad}; color: {scale.ink(bad)}; }}"])


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_asset("page.html"))
