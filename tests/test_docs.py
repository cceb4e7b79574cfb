"""The code of every page is run, and what a page says that it prints is what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from docs import running

ROOT = Path(__file__).parent.parent
FILES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PAGES = {page.relative_to(ROOT).as_posix(): page.read_text() for page in FILES}
ELSEWHERE = {"docs/authoring.md": "tests/test_authoring.py", "README.md": "tests/test_readme.py"}
"""Pages whose code needs more than the page gives, with the tests that run it."""
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
            assert running.stable(printed) == running.stable(block.printed), f"python -m docs.running {page}"


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
    import os

    before = (Path.cwd(), dict(os.environ))
    list(running.run([running.Block("python", "import torch; torch.manual_seed(3); open('x', 'w').close()\n", 1)]))
    assert (Path.cwd(), dict(os.environ)) == before
