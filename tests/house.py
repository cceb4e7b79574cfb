"""The house in figures: rooms, circles of files, private names of other packages. The table in ARCHITECTURE.md.

Patches are not in the table: a new one is one file, and no other needs a change.

`python -m tests.house` writes the table. `python -m tests.house --measure` runs `make quick` and `make test` before
that and writes how long they took to `benchmarks/results/tests.json`; for a machine that does nothing else.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "ARCHITECTURE.md"
MEASURED = ROOT / "benchmarks" / "results" / "tests.json"
MARKS = ("<!-- the house in figures: python -m tests.house -->\n", "<!-- end of the figures -->\n")
DOORS = ROOT / "hfpatch" / "compat"
SUITES = ("quick", "test")

OURS = {
    "_hfpatch": "key of the records that a module carries",
    "_facts": "a slot of `Outcome`",
    "_norms": "a slot of `Outcome`",
    "_fields": "Python's documented name of what a named tuple holds",
}
"""Names with an underscore, as text outside `compat`, that are no private names of another package."""

ENDINGS = ("endswith", "removesuffix")
"""Methods that take the end of a name, which may begin with an underscore."""

PRIVATE = re.compile(r"(?:\w+\.)*_[a-zA-Z]\w*(?:\.\w+)*\.?")


def files(*folders: str) -> list[Path]:
    return sorted(p for folder in folders or ("hfpatch", "patches") for p in (ROOT / folder).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def rooms() -> dict[str, list[Path]]:
    """The modules of each folder, those of the folders in it left out."""
    found: dict[str, list[Path]] = {}
    for path in files():
        found.setdefault(str(path.parent.relative_to(ROOT)), []).append(path)
    return found


def circles() -> list[frozenset[str]]:
    """Modules that import each other, however indirectly; imports in functions and for types count."""
    graph = grimp.build_graph("hfpatch", exclude_type_checking_imports=False, cache_dir=None)
    above = {module: graph.find_upstream_modules(module) for module in graph.modules}
    found = {frozenset({a, *(b for b in above[a] if a in above[b])}) for a in graph.modules}
    return sorted((circle for circle in found if len(circle) > 1), key=sorted)


def namesakes() -> dict[str, list[str]]:
    """Names that several modules or folders have, with where they are; the command line and old paths left out."""
    found: dict[str, list[str]] = {}
    for path in files("hfpatch"):
        place = path.relative_to(ROOT)
        if place.parts[1] not in ("cli", "old_paths"):
            place = place.parent if path.name == "__init__.py" else place
            found.setdefault(place.stem, []).append(str(place.parent))
    return {name: places for name, places in found.items() if len(places) > 1}


def private_names(path: Path, foreign: frozenset[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """Line and name of each private name that is not the file's own: attributes, imports, and text that is a name.

    Args:
        path: The file.
        foreign: Private names that other packages' classes give to `self`.
    """
    passed = {id(node) for node in _passed_over(tree(path))}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            own = (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")) or _is_super(node.value)
            if not own or node.attr in foreign:
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, name) for name in names if _is_private(name))
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
            yield from ((node.lineno, name) for name in names if _is_private(name))
        elif isinstance(node, ast.Constant) and id(node) not in passed and _names_private(node.value):
            yield node.lineno, str(node.value)


def _is_private(name: str) -> bool:
    return re.fullmatch(r"_[a-zA-Z]\w*", name) is not None


def _names_private(value: object) -> bool:
    return isinstance(value, str) and PRIVATE.fullmatch(value) is not None and value not in OURS


def _is_super(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "super"


def _passed_over(module: ast.Module) -> Iterator[ast.AST]:
    """Text that is no name: parts of longer text, and ends of names."""
    for node in ast.walk(module):
        if isinstance(node, ast.JoinedStr):
            yield from node.values
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ENDINGS:
            yield from node.args


def doors() -> dict[str, list[str]]:
    """What each module of `compat` offers: functions, classes and constants without an underscore."""
    found: dict[str, list[str]] = {}
    for path in sorted(DOORS.glob("*.py")):
        names: list[str] = []
        for node in tree(path).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.append(node.name)
            elif isinstance(node, ast.Assign):
                names += [n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.append(node.target.id)
        found[path.stem] = [name for name in names if not name.startswith("_")]
    return {name: offered for name, offered in found.items() if offered}


def measured() -> dict[str, str]:
    """How long the suites took, in words."""
    if not MEASURED.exists():
        return dict.fromkeys(SUITES, "not measured")
    found = json.loads(MEASURED.read_text(encoding="utf-8"))
    return {suite: f"{found[suite]['seconds']:.0f} s on {found[suite]['cores']} cores" for suite in SUITES}


def measure() -> None:
    found: dict[str, dict[str, float]] = {}
    for suite in SUITES:
        start = time.monotonic()
        subprocess.run(["make", suite], cwd=ROOT, check=True)
        found[suite] = {"seconds": round(time.monotonic() - start, 1), "cores": os.cpu_count() or 0}
    MEASURED.write_text(f"{json.dumps(found, indent=2)}\n", encoding="utf-8")


def table() -> str:
    """The figures. Lines are in hundreds, so that a small change of code is none of the table."""
    inner = {name for path in DOORS.glob("*.py") for _, name in private_names(path)}
    outer = sum(1 for path in files() if path.parent != DOORS for _ in private_names(path))
    rows = [("room", "modules", "lines, in hundreds")]
    ours = {folder: held for folder, held in rooms().items() if not folder.startswith("patches")}
    for folder, held in ours.items():
        rows.append((f"`{folder}`", str(len(held)), f"{round(sum(map(lines, held)) / 100)}"))
    every = files("hfpatch")
    rows.append(("all", str(len(every)), f"{round(sum(map(lines, every)) / 100)}"))
    facts = [
        ("figure", "value"),
        ("circles of files", str(len(circles()))),
        ("private names of other packages in `compat`", str(len(inner))),
        ("uses of such names outside `compat`", str(outer)),
        *((f"`make {suite}`", took) for suite, took in measured().items()),
    ]
    return f"{_markdown(facts)}\n{_markdown(rows)}"


def _markdown(rows: list[tuple[str, ...]]) -> str:
    rows = [rows[0], tuple("---" for _ in rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def written() -> str:
    """The table as it stands in ARCHITECTURE.md."""
    return PAGE.read_text(encoding="utf-8").partition(MARKS[0])[2].partition(MARKS[1])[0]


def write() -> None:
    before, begins, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    _, ends, after = rest.partition(MARKS[1])
    if not begins or not ends:
        raise SystemExit(f"{PAGE.name} lacks the lines between which the table goes: {MARKS[0]!r} and {MARKS[1]!r}")
    PAGE.write_text(f"{before}{begins}{table()}{ends}{after}", encoding="utf-8")


if __name__ == "__main__":
    if "--measure" in sys.argv[1:]:
        measure()
    write()
    print(table())
