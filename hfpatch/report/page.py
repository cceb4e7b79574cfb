"""A heat map as a self-contained HTML page, made of `page.html`, `page.css` and `page.js`."""

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
"""Width of a character of a label, in pixels."""
BESIDE = 410
"""Width of the panel and the margins beside the map on a wide screen, in pixels."""
BADGE = 58
"""Width of the words before the first bad row's label, in pixels."""


def render(shown: Grid) -> str:
    """Return the page; its content security policy allows only its own style and script, by hash."""
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
    """Return the CSS that depends on the map and on `scale`; with a policy by hash, elements cannot have styles."""
    columns, rows = max(1, len(shown.columns)), max(1, len(shown.rows))
    label = CHARACTER * min(48, max((len(name) for name in shown.rows), default=0)) + 16 + BADGE * bool(shown.first_bad)
    return "\n".join(
        (
            f":root {{ --rows: {rows}; --columns: {columns}; --label: {label}px; }}",
            _colours(scale.LIGHT, scale.LIGHT_BAD),
            "@media (prefers-color-scheme: dark) {",
            _colours(scale.DARK, scale.DARK_BAD),
            "}",
            # numbers are shown in cells only if the page is wide enough for all columns
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
