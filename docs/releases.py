"""Writes the table of docs/releases.md from releases.toml: `python -m docs.releases`."""

from __future__ import annotations

import tomllib
from pathlib import Path

from docs.atlas import table

DOCS = Path(__file__).parent
PAGE = DOCS / "releases.md"
BEGIN, END = "<!-- releases: made by docs/releases.py -->", "<!-- end of releases -->"


def sets() -> dict[str, dict[str, str]]:
    """Return the sets of releases: `lowest`, `tested` and `newest`, package -> release."""
    return tomllib.loads((DOCS.parent / "releases.toml").read_text())


def pins() -> dict[str, str]:
    """Return what constraints.txt pins, package -> release."""
    lines = (DOCS.parent / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def filled(page: str) -> str:
    """Return the page with the table in it."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    found = sets()
    rows = [(package, *(each[package] for each in found.values())) for package in found["tested"]]
    lines = "\n".join(table(("package", *found), rows))
    return f"{before}{BEGIN}\n{lines}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
