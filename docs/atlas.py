"""Writes docs/atlas.json, docs/atlas.md and docs/eps.md: `python docs/atlas.py`.

Reads every architecture first, about a minute on two cores. With `--render` the pages are written again from the
atlas.json that is there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
if str(DOCS.parent) not in sys.path:  # a checkout need not be installed
    sys.path.append(str(DOCS.parent))

Rows = Mapping[str, Mapping[str, Any]]


def main() -> None:
    """Read, unless told to render alone, and write."""
    if sys.argv[1:] != ["--render"]:
        from hfpatch.atlas.atlas import read_atlas

        (DOCS / "atlas.json").write_text(as_json(read_atlas().to_dict()))
    atlas = json.loads((DOCS / "atlas.json").read_text())
    (DOCS / "atlas.md").write_text(atlas_page(atlas))
    (DOCS / "eps.md").write_text(eps_page(atlas))


def as_json(atlas: Mapping[str, Any]) -> str:
    """One architecture a line, so that a change shows as one."""
    lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in atlas["architectures"].items()]
    rows = ",\n".join(lines)
    return f'{{"versions": {json.dumps(atlas["versions"])},\n"architectures": {{\n{rows}\n}}}}\n'


def atlas_page(atlas: Mapping[str, Any]) -> str:
    """The atlas as Markdown."""
    from hfpatch.atlas.tables import COLUMNS, cells, kinds

    rows: Rows = atlas["architectures"]
    built = {name: row for name, row in rows.items() if "reason" not in row}
    counts = kinds(rows)
    return "\n".join(
        [
            "# Atlas of architectures",
            "",
            f"{len(built)} of the {len(rows)} architectures that transformers {atlas['versions']['transformers']} maps "
            "to a causal, multimodal or encoder-decoder language model, read from the default config of each, built on "
            "meta: no weights, no network. Made by `python docs/atlas.py`; `hfpatch inspect --all` prints the same for "
            "the transformers at hand, `--json` all of it. The whole of it is in [atlas.json](atlas.json), one "
            "architecture a line. What differs from one release of transformers to the next differs here.",
            "",
            *table(("what", "architectures"), counts),
            "",
            "In paths, `*` stands for each layer. Layers: `n text` are layers that read text; after it what mixes "
            "tokens, where it is not attention alone.",
            "",
            *table(COLUMNS, [(name, *cells(row)) for name, row in built.items()]),
            "",
            "## Not built from their default config",
            "",
            *table(("architecture", "why"), [(n, row["reason"]) for n, row in rows.items() if "reason" in row]),
            "",
        ]
    )


def eps_page(atlas: Mapping[str, Any]) -> str:
    """The eps audit as Markdown."""
    from hfpatch.atlas.eps_audit import Departure, audit

    found = audit(atlas["architectures"])
    apart = [d for d in found if d.differs]
    same = [d for d in found if not d.differs]

    def lines(departures: Iterable[Departure]) -> list[tuple[str, ...]]:
        return [
            (
                d.architecture,
                f"`{d.norm.path}`",
                d.norm.cls,
                f"{d.norm.eps:g}",
                d.norm.source,
                ", ".join(f"{key} = {value:g}" for key, value in d.norm.expected),
                f"{d.verdict}: {d.why}" if d.why else d.verdict,
            )
            for d in departures
        ]

    columns = ("architecture", "norm", "class", "eps", "from", "key one would expect", "which is right")
    names = {d.architecture for d in found}
    return "\n".join(
        [
            "# Norms that do not follow the config",
            "",
            f"Of the architectures in [the atlas](atlas.md), {len(names)} have a norm whose eps does not come from a "
            "key of its own model's config, though there is one. Proved, not guessed from equal numbers: each class "
            "was built with every eps key set to a number of its own. Made by `python docs/atlas.py` with transformers "
            f"{atlas['versions']['transformers']}.",
            "",
            "This is a report. Many of these are as their authors meant them, so nothing here is to be rewritten "
            "wholesale; hfpatch changes none of them unless you name it (`hfpatch explain eps-alignment`). `not "
            "checked` means that nobody compared it with a reference implementation yet.",
            "",
            f"## Another number than the key has: {len(apart)}",
            "",
            *table(columns, lines(apart)),
            "",
            f"## The same number today: {len(same)}",
            "",
            "These part from the config as soon as somebody sets the key.",
            "",
            *table(columns, lines(same)),
            "",
        ]
    )


def table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    """Lines of a Markdown table."""
    head = list(columns)
    body = [[str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]


if __name__ == "__main__":
    main()
