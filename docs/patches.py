"""Writes docs/patches/*.md and the table of patches in README.md: `python -m docs.patches`.

Everything on these pages is in the file of a patch and in the proofs beside it. In its docstring, the line before the
headings says what it does, the paragraph after it the fault and the fix, and its last sentence, `By default: ...`, when
a bare `apply` runs it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from docs.atlas import table
from hfpatch.patching import registry
from hfpatch.patching.catalogue import explain
from hfpatch.patching.language import HEADINGS, UNASKED
from hfpatch.patching.proofs.proof import OUTCOMES, Proof
from hfpatch.patching.proofs.shelf import shipped
from hfpatch.patching.registry import Entry

DOCS = Path(__file__).parent
ROOT = DOCS.parent
README = ROOT / "README.md"
FOLDER = DOCS / "patches"
BEGIN, END = "<!-- patches: made by docs/patches.py -->", "<!-- end of patches -->"
DEFAULT = "By default: "
ALL = "every architecture"


@dataclass(frozen=True)
class Lead:
    """The beginning of a patch's docstring.

    Attributes:
        line: What it does.
        text: The fault and the fix; the line again if the file has no more.
        default: When a bare `apply` runs it.
    """

    line: str
    text: str
    default: str


def lead(entry: Entry) -> Lead:
    """Return the beginning of the docstring of a patch."""
    line, _, more = entry.sections[""].partition("\n\n")
    text, _, said = " ".join(more.split()).partition(DEFAULT)
    line = " ".join(line.split())
    return Lead(line, text.strip() or line, said.removesuffix(".") or ("yes" if entry.effect in UNASKED else "no"))


def rows() -> list[tuple[str, str, str]]:
    """Return id as a link from the root, fault and fix, and when a bare `apply` runs it: those that may run first."""
    found = [(entry, lead(entry)) for entry in registry.entries().values()]
    found.sort(key=lambda pair: (pair[1].default == "no", pair[0].id))
    return [(f"[`{e.id}`](docs/patches/{e.id}.md)", f"{said.text}{_proved(e)}", said.default) for e, said in found]


def _proved(entry: Entry) -> str:
    return f" Proved for {len(entry.architectures)} architectures." if entry.patch.serves else ""


def index() -> str:
    """Return the page that lists the patches."""
    body = [(_plain_link(link), text, default) for link, text, default in rows()]
    return "\n".join(
        [
            "# The patches",
            "",
            "A page for each, made from its file and its proofs by `python -m docs.patches`. `hfpatch explain ID` "
            "prints the same. A bare `apply` runs patches that are exact, equivalent up to rounding, or limited to "
            "added modules that are provably untrained; the others run if they are named.",
            "",
            *table(("patch", "fault and fix", "by default"), body),
            "",
            "```{toctree}",
            ":hidden:",
            ":glob:",
            "",
            "*",
            "```",
            "",
        ]
    )


def _plain_link(link: str) -> str:
    return link.replace("docs/patches/", "")


def page(entry: Entry) -> str:
    """Return the page of a patch."""
    said = lead(entry)
    file = entry.file.relative_to(ROOT).as_posix()
    facts = [(label, _escaped(text)) for label, text in explain(entry.id).sheet().rows if label not in HEADINGS]
    facts = [("by default", said.default), *(f for f in facts if f[0] != "serves")]
    doc = inspect.cleandoc(_docstring(entry.file))
    sections = [part.partition("\n") for part in doc.split("\n## ")[1:]]
    return "\n".join(
        [
            f"# {entry.id}",
            "",
            said.text,
            "",
            f'`hfpatch.apply(model, {_how(said)}"{entry.id}")` runs it by name. Its file: [{file}](../../{file}).',
            "",
            *table(("", ""), facts),
            "",
            *(line for heading, _, text in sections for line in (f"## {heading}", "", text.strip(), "")),
            "## Architectures",
            "",
            *architectures(entry),
            "",
        ]
    )


def _how(said: Lead) -> str:
    """A patch that a bare `apply` runs is run alone with `only=`; another is added with `include=`."""
    return "include=" if said.default == "no" else "only="


def _docstring(file: Path) -> str:
    import ast

    return ast.get_docstring(ast.parse(file.read_text())) or ""


def _escaped(text: str) -> str:
    return re.sub(r"([*<])", r"\\\1", text.strip())


def architectures(entry: Entry) -> list[str]:
    """Return what is known of architectures: those declared, or what proofs say of each."""
    if not entry.patch.serves:
        names = ", ".join(f"`{name}`" for name in entry.architectures)
        return [f"It is for {ALL if entry.architectures == ('*',) else names}."]
    mine = [p for p in shipped(entry.file) if p.subject.patch == entry.digest]
    lines = [
        f"It serves {entry.patch.serves}. Its repros were run on a tiny model of each architecture that has "
        "them, and of the flags of its config that its layers read, which stand in brackets."
    ]
    for releases in sorted({_releases(p) for p in mine}, reverse=True):
        proofs = [p for p in mine if _releases(p) == releases]
        found = {word: sorted({p.subject.name for p in proofs if p.outcome == word}) for word in OUTCOMES}
        counts = [(f"*{word}*", meaning, len(found[word])) for word, meaning in OUTCOMES.items()]
        lines += ["", f"{releases}:", "", *table(("outcome", "what it means", "number"), counts), ""]
        lines += [line for word, names in found.items() if names for line in _named(word, names)]
    return lines


def _releases(proof: Proof) -> str:
    return f"transformers {proof.subject.transformers}, torch {proof.subject.torch}"


def _named(word: str, names: Iterable[str]) -> list[str]:
    return [f"*{word}*: {', '.join(f'`{name}`' for name in names)}", ""]


def filled(readme: str) -> str:
    """Return the README with the table of patches in it."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = "\n".join(table(("patch", "fault and fix", "by default"), rows()))
    return f"{before}{BEGIN}\n{lines}\n{END}{after}"


def pages() -> dict[Path, str]:
    """Return the pages by path."""
    made = {FOLDER / f"{entry.id}.md": page(entry) for entry in registry.entries().values()}
    return {FOLDER / "index.md": index(), **made}


def main() -> None:
    """Write the pages and the table, and remove pages of patches that are gone."""
    FOLDER.mkdir(exist_ok=True)
    made = pages()
    for stale in set(FOLDER.glob("*.md")) - set(made):
        stale.unlink()
    for path, text in made.items():
        path.write_text(text)
    README.write_text(filled(README.read_text()))


if __name__ == "__main__":
    main()
