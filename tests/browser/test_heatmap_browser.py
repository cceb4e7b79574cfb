"""The page in a real Chromium: what a person does with it, on a desk and on a telephone."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, sync_playwright

from hfpatch.report.heatmap import Heatmap
from tests.heat import HOSTILE, example

pytestmark = pytest.mark.browser

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
SHOWN = example()
FIRST = (0, 0) if SHOWN.first_bad is None else SHOWN.first_bad
FIRST_NAME = f"{SHOWN.rows[FIRST[0]]}, {SHOWN.columns[FIRST[1]]}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    assert chromium is not None, "no chromium on the path: make test-browser installs it"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Opens maps as pages; none of them may throw, complain or ask for anything."""
    pages: list[Page] = []
    problems: list[str] = []

    def opens(shown: Heatmap, **how: object) -> Page:
        file = tmp_path / f"{len(pages)}.html"
        file.write_text(shown.to_html())
        page = browser.new_page(**how)
        pages.append(page)
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda asked: problems.append(asked.url) if asked.url != file.as_uri() else None)
        page.goto(file.as_uri())
        return page

    yield opens
    for page in pages:
        page.close()
    assert problems == []


@pytest.fixture(params=[(1280, 900), (400, 800)], ids=["1280", "400"])
def page(opened: Callable[..., Page], request: pytest.FixtureRequest) -> Page:
    width, height = request.param
    return opened(SHOWN, viewport={"width": width, "height": height})


def cell(page: Page, row: int, column: int) -> Locator:
    return page.locator(".map tbody tr").nth(row).locator("td").nth(column)


def on_top(found: Locator) -> bool:
    """Whether a click in its middle would meet it: on the screen, in its frame, under nothing."""
    return found.evaluate(
        "e => { const b = e.getBoundingClientRect();"
        " return document.elementFromPoint(b.x + b.width / 2, b.y + b.height / 2) === e; }"
    )


def where(page: Page) -> str:
    return page.locator("#where").inner_text()


def test_opens_with_the_first_bad_cell_on_the_screen(page: Page) -> None:
    first = page.locator("#first")
    assert on_top(first)
    assert page.evaluate("window.scrollY") == 0
    assert first.inner_text() == "×"
    assert "0px 0px 0px 5px" in first.evaluate("e => getComputedStyle(e).boxShadow"), "the outline"
    assert on_top(page.get_by_text("first bad", exact=True))
    assert where(page) == FIRST_NAME


def test_the_page_does_not_scroll_sideways(page: Page) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_click_shows_the_numbers(page: Page) -> None:
    cell(page, 41, 6).click()
    assert where(page) == "model.layers.40, step 3"
    assert page.locator("#says").inner_text() == SHOWN.cells[41, 6].sentence
    assert page.locator("#facts dt").all_inner_texts() == [name for name, _ in SHOWN.cells[41, 6].facts]
    assert page.locator("#facts dd").all_inner_texts() == [value for _, value in SHOWN.cells[41, 6].facts]
    assert on_top(page.locator("#says"))
    assert page.locator("[aria-selected]").count() == 1


def test_a_place_that_was_not_measured_says_so(page: Page) -> None:
    cell(page, len(SHOWN.rows) - 2, 1).click()
    assert where(page) == f"{HOSTILE}, step 0 backward"
    assert page.locator("#says").inner_text() == "Nothing was measured."
    assert page.locator("#facts dt").count() == 0


def test_the_link_leads_back(page: Page) -> None:
    cell(page, 0, 0).click()
    page.evaluate("window.scrollTo(0, 0)")
    page.locator("#jump").click()
    assert where(page) == FIRST_NAME
    assert page.evaluate("document.activeElement.id") == "first"
    assert on_top(page.locator("#first"))


def test_the_keyboard_alone(page: Page) -> None:
    page.locator("#jump").focus()
    page.keyboard.press("Tab")  # the frame, which Chromium lets scroll by keys, or the cell in it
    if page.evaluate("document.activeElement.id") != "first":
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "first"
    for key in ("ArrowUp", "ArrowUp", "ArrowLeft", "Enter"):
        page.keyboard.press(key)
    assert where(page) == f"{SHOWN.rows[FIRST[0] - 2]}, {SHOWN.columns[FIRST[1] - 1]}"
    page.keyboard.press("Control+Home")
    for key in ("ArrowUp", "ArrowLeft", "Space"):  # there is nothing beyond the corner
        page.keyboard.press(key)
    assert where(page) == "model.embed_tokens, step 0"
    page.keyboard.press("Control+End")
    page.keyboard.press("Enter")
    assert where(page) == f"lm_head, {SHOWN.columns[-1]}"
    focused = page.locator("td:focus")
    assert focused.count() == 1
    box, frame = focused.bounding_box(), page.locator(".scroll").bounding_box()
    assert box is not None
    assert frame is not None
    assert frame["y"] <= box["y"]
    assert box["y"] + box["height"] <= frame["y"] + frame["height"] + 1
    assert page.locator(".map td[tabindex='0']").count() == 1


def test_a_focused_cell_is_not_under_the_labels(page: Page) -> None:
    cell(page, 60, 12).click()
    for key in (*["PageUp"] * 5, *["ArrowLeft"] * 10):
        page.keyboard.press(key)
    page.evaluate("document.querySelector('aside').remove()")
    page.locator(".scroll").evaluate("e => window.scrollTo(0, e.getBoundingClientRect().top + scrollY)")
    assert on_top(page.locator("td:focus"))


def test_keys_answer_at_once(opened: Callable[..., Page]) -> None:
    """A cell that gets the focus must not lay thousands of others out again."""
    page = opened(example(80, 20), viewport={"width": 1280, "height": 900})
    milliseconds = page.locator("#first").evaluate(
        """first => {
            first.focus();
            return Array.from({ length: 9 }, () => {
                const began = performance.now();
                const event = new KeyboardEvent("keydown", { key: "ArrowUp", bubbles: true });
                document.activeElement.dispatchEvent(event);
                document.body.getBoundingClientRect();
                return performance.now() - began;
            });
        }"""
    )
    assert sorted(milliseconds)[4] < 100, "what a person takes for at once"


def test_a_hostile_name_is_shown_and_not_run(page: Page) -> None:
    cell(page, len(SHOWN.rows) - 2, 0).click()
    assert where(page) == f"{HOSTILE}, step 0"
    assert page.evaluate("window.broken") is None


def test_a_script_that_got_in_would_not_run(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "map.html"
    file.write_text(SHOWN.to_html().replace("</body>", "<script>window.broken = 1</script></body>"))
    page = browser.new_page()
    page.goto(file.as_uri())
    assert page.evaluate("window.broken") is None
    assert where(page) == FIRST_NAME, "its own script runs"
    page.close()


def test_numbers_are_in_the_cells_where_there_is_room(opened: Callable[..., Page]) -> None:
    for width, shown in ((1280, False), (1900, True)):
        number = cell(opened(SHOWN, viewport={"width": width, "height": 900}), 41, 6).locator("i")
        box = number.bounding_box()
        assert box is not None
        assert (box["width"] > 5) == shown
        assert number.text_content() == SHOWN.cells[41, 6].short, "for readers of the screen, always"


def test_dark(opened: Callable[..., Page]) -> None:
    colours = [
        opened(SHOWN, color_scheme=scheme).evaluate(
            "['.bad', '.b0', '.b16'].map(c => getComputedStyle(document.querySelector(c)).backgroundColor)"
        )
        for scheme in ("light", "dark")
    ]
    brightness = [[sum(int(n) for n in c[4:-1].split(", ")) for c in scheme] for scheme in colours]
    light, dark = brightness
    assert light == sorted(light), "on paper, the limit is dark"
    assert dark == sorted(dark, reverse=True), "on black, the limit is light"


@pytest.mark.parametrize(("layers", "steps"), [(1, 1), (200, 1), (80, 20)])
@pytest.mark.parametrize("width", [1280, 400])
def test_other_sizes(opened: Callable[..., Page], layers: int, steps: int, width: int) -> None:
    shown = example(layers, steps)
    page = opened(shown, viewport={"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    cell(page, len(shown.rows) - 1, 2 * steps - 1).click()
    assert where(page) == f"lm_head, {shown.columns[-1]}"
    box = cell(page, 0, 0).bounding_box()
    assert box is not None
    assert box["height"] >= 13
    assert box["width"] >= 16


def test_nothing_at_all(opened: Callable[..., Page]) -> None:
    assert "Nothing was measured." in opened(Heatmap("trace", (), (), {}, None, (), ())).inner_text("main")
