"""The code of every page is run, and what a page says that it prints is what it prints."""

from __future__ import annotations

import ast
import os
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import hfpatch
from docs import api, patches, running
from hfpatch.patching import registry

ROOT = Path(__file__).parent.parent
FILES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PAGES = {page.relative_to(ROOT).as_posix(): page.read_text() for page in FILES}
ELSEWHERE = {"docs/authoring.md": "tests/test_authoring.py", "README.md": "tests/test_readme.py"}
"""Pages whose code needs more than the page gives, with the tests that run it."""
PUBLIC = [name for name in hfpatch.__all__ if not name.startswith("_")]
NAMED = (ast.FunctionDef, ast.ClassDef)
SECTIONS = [
    pytest.param(page, heading, blocks, id=f"{page}: {heading}")
    for page, text in PAGES.items()
    if page not in ELSEWHERE
    for heading, blocks in running.sections(text).items()
]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "heading", "blocks"), SECTIONS)
def test_code_runs_and_prints_what_the_page_says(page: str, heading: str, blocks: list[running.Block]) -> None:
    for block, printed in running.run(blocks, page=str(ROOT / page)):
        if block.printed is not None:
            got, said = running.stable(printed), running.stable(block.printed)
            if not as_pinned():  # a plan adds that it proved by itself what the shipped proofs are not about
                said = running.stable(block.printed.partition("\n")[0])
                got = got[: len(said)]
            assert got == said, f"python -m docs.running {page}"


def as_pinned() -> bool:
    """True if the pages were written with the releases of torch and transformers that are installed."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    return all(metadata.version(name).partition("+")[0] == pins[name] for name in ("torch", "transformers"))


def test_pages_have_code() -> None:
    assert len(SECTIONS) > 15
    assert all((ROOT / test).exists() for test in ELSEWHERE.values())


PAGE = """# A page

```python
x = 1
print(x + 1, "model.layers.1")
```

```text printed
9 model.layers.1
```

## Another

```python
raise ValueError("no such thing")
```

```text printed
```

```toml
key = 1
```

## Fails

```python
print(x)
```
"""


def test_a_page_is_run_by_section_and_filled() -> None:
    found = running.sections(PAGE)
    assert {heading: len(blocks) for heading, blocks in found.items()} == {"A page": 1, "Another": 1, "Fails": 1}
    page = PAGE.partition("## Fails")[0]
    assert "```text printed\n2 model.layers.1\n```" in running.filled(page)
    assert "```text printed\nValueError: no such thing\n```" in running.filled(page)
    with pytest.raises(NameError, match="'x' is not defined"):
        list(running.run(found["Fails"]))
    assert "x + 1" in found["A page"][0].code
    assert PAGE.splitlines()[found["A page"][0].line - 1] == "x = 1"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("loss 4.171,  1,024 tokens", "loss 4.2, 17 tokens", True),
        ("3e-05 of  its\nsize", "-1.2e+05 of its size", True),
        ("model.layers.1", "model.layers.2", False),
        ("residual add", "a cast", False),
        ("float16", "float32", False),
    ],
)
def test_what_is_stable(one: str, other: str, same: bool) -> None:
    assert (running.stable(one) == running.stable(other)) is same


def test_a_command_that_is_not_hfpatch_is_refused() -> None:
    blocks: Any = [running.Block("sh", "rm -r x\n", 3)]
    with pytest.raises(ValueError, match="page:3: a block of sh holds 'hfpatch' commands only, not 'rm'"):
        list(running.run(blocks))


def test_nothing_is_left_behind() -> None:
    before = (Path.cwd(), dict(os.environ))
    list(running.run([running.Block("python", "import torch; torch.manual_seed(3); open('x', 'w').close()\n", 1)]))
    assert (Path.cwd(), dict(os.environ)) == before


@pytest.mark.slow  # a new patch is one file; `make pages` writes the rest
@pytest.mark.parametrize("patch", sorted(registry.entries()))
def test_the_page_of_a_patch_is_made_of_its_file_and_proofs(patch: str) -> None:
    page = patches.FOLDER / f"{patch}.md"
    assert page.read_text() == patches.page(registry.get(patch)), "python -m docs.patches writes it"


@pytest.mark.slow
def test_the_page_of_all_patches_is_made_of_their_files() -> None:
    assert (patches.FOLDER / "index.md").read_text() == patches.index(), "python -m docs.patches writes it"


@pytest.mark.slow
def test_no_page_of_a_patch_that_is_gone() -> None:
    assert set(patches.FOLDER.glob("*.md")) == set(patches.pages())


@pytest.mark.slow
def test_the_page_of_the_api_is_made_of_docstrings() -> None:
    page = api.page()
    assert api.PAGE.read_text() == page, "python -m docs.api writes it"
    assert all(f"\n### hfpatch.{name}\n" in page or f"\n## hfpatch.{name}\n" in page for name in PUBLIC)


def test_links_lead_somewhere() -> None:
    for name, text in PAGES.items():
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            assert target.startswith("https://") or (ROOT / name).parent.joinpath(target).exists(), f"{name}: {target}"


def test_what_a_page_says_that_a_test_holds_is_held_by_a_test() -> None:
    named = re.findall(r"`(tests/\w+\.py)::([\w:]+)`", PAGES["docs/distributed.md"])
    assert len(named) > 20
    for file, test in named:
        defined = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, NAMED)}
        assert set(test.split("::")) <= defined, f"{file}::{test}"


def test_every_section_of_symptoms_is_in_its_table() -> None:
    page = PAGES["docs/symptoms.md"]
    table, *rest = page.split("\n## ")
    headings = [part.partition("\n")[0] for part in rest]
    assert re.findall(r"^\| \[(.+?)\]\(#", table, flags=re.MULTILINE) == headings
