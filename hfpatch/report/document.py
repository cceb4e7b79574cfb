"""Tables as one self-contained HTML page, dark and light, without paths, tokens and host names."""

from __future__ import annotations

import base64
import hashlib
import html
import re
import socket
from collections.abc import Iterable

from hfpatch.report.sheet import Sheet

STYLE = """
:root { color-scheme: light dark; --ink: #1b1c1f; --paper: #fff; --soft: #5d6069; --line: #d9dbe0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e9e9ec; --paper: #151619; --soft: #a3a6b0; --line: #3b3d44; } }
body { margin: 0 auto; padding: 20px; max-width: 1000px; font: 14px/1.45 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 19px; } h2 { margin: 26px 0 6px; font-size: 15px; white-space: pre-wrap; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: 4px 12px 4px 0; text-align: left; vertical-align: top; white-space: pre-wrap;
  overflow-wrap: anywhere; border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 400; } p { margin: 4px 0; color: var(--soft); white-space: pre-wrap; }
pre { padding: 10px; overflow: auto; border: 1px solid var(--line); }
"""

PATHS = re.compile(r"(?<![\w.:/])(?:[A-Za-z]:\\|/|~/)(?:[\w.@+ -]+[/\\])+([\w.@+-]+)")
TOKENS = re.compile(r"\b(?:hf|ghp|gho|sk)[_-][A-Za-z0-9_-]{8,}\b")


def document(title: str, sheets: Iterable[Sheet]) -> str:
    """Return a page with a section for each table; a table without rows is shown as code."""
    policy = f"default-src 'none'; style-src 'sha256-{_digest(STYLE)}'; base-uri 'none'; form-action 'none'"
    body = "\n".join(_section(s) for s in sheets)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{_text(title)}</h1>\n{body}\n"
        "</body>\n</html>\n"
    )


def anonymous(text: str) -> str:
    """Return a text without what tells whose machine it comes from: folders of paths, tokens, the host's name."""
    text = TOKENS.sub("(token)", PATHS.sub(r"\1", text))
    host = socket.gethostname()
    return re.sub(rf"(?<!\w){re.escape(host)}(?!\w)", "(host)", text) if len(host) > 3 else text


def _section(sheet: Sheet) -> str:
    if not sheet.columns and sheet.notes:
        return f"<h2>{_text(sheet.title)}</h2>\n<pre>{_text(chr(10).join(sheet.notes))}</pre>"
    head = "".join(f"<th>{_text(name)}</th>" for name in sheet.columns)
    rows = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>\n" for row in sheet.rows)
    table = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table>" if sheet.rows else ""
    notes = "".join(f"<p>{_text(note)}</p>\n" for note in sheet.notes)
    return f"<h2>{_text(sheet.title)}</h2>\n{table}\n{notes}"


def _text(text: str) -> str:
    return html.escape(anonymous(text))


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
