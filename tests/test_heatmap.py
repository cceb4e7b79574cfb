"""The heat map as a page and as a PNG, its colours, and files that are written whole."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import json
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import image

from hfpatch.errors import InputError
from hfpatch.report import scale
from hfpatch.report.files import write_atomically
from hfpatch.report.grid import Cell
from hfpatch.report.heatmap import Heatmap
from tests.heat import HOSTILE, LAYERS, example

EMPTY = Heatmap("trace", (), (), {}, None, (), ())


class Parsed(HTMLParser):
    """Cells, row labels, what the policy says, and the text of each script and style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.cells: list[dict[str, str | None]] = []
        self.rows: list[str | None] = []
        self.policy = ""
        self.texts: dict[str, str] = {}
        self.inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = dict(attrs)
        if said.get("role") == "gridcell":
            self.cells.append(said)
        if said.get("scope") == "row":
            self.rows.append(said["title"])
        if said.get("http-equiv") == "Content-Security-Policy":
            self.policy = said["content"] or ""
        assert "style" not in said, "the policy forbids it"
        self.inside = {"script": said.get("type") or "script", "style": "style"}.get(tag, "")
        if self.inside:
            assert self.inside not in self.texts, "one of each"
            self.texts[self.inside] = ""

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.texts[self.inside] += data


def classes(cell: dict[str, str | None]) -> list[str]:
    return (cell["class"] or "").split()


class TestPage:
    def test_one_cell_for_each_place(self) -> None:
        shown = example()
        page = Parsed(shown.to_html())
        assert tuple(page.rows) == shown.rows
        assert len(page.cells) == len(shown.rows) * len(shown.columns)
        for index, cell in enumerate(page.cells):
            held = shown.cells.get(divmod(index, len(shown.columns)))
            want = "none" if held is None else "bad" if held.bad else f"b{held.band}"
            assert classes(cell)[0] == want

    def test_the_first_bad_cell_is_the_one_marked_and_the_one_the_tab_key_reaches(self) -> None:
        shown = example()
        assert shown.first_bad is not None
        page = Parsed(shown.to_html())
        at = shown.first_bad[0] * len(shown.columns) + shown.first_bad[1]
        assert [i for i, c in enumerate(page.cells) if c.get("id") == "first"] == [at]
        assert [i for i, c in enumerate(page.cells) if "first" in classes(c)] == [at]
        assert [i for i, c in enumerate(page.cells) if c["tabindex"] == "0"] == [at]

    def test_the_facts_of_every_cell_are_in_it(self) -> None:
        shown = example(5, 2)
        held = json.loads(Parsed(shown.to_html()).texts["application/json"])
        for r in range(len(shown.rows)):
            for c in range(len(shown.columns)):
                cell = shown.cells.get((r, c))
                assert held[r][c] == (None if cell is None else [cell.sentence, [list(f) for f in cell.facts]])

    def test_the_policy_allows_its_own_style_and_script_only(self) -> None:
        page = Parsed(example().to_html())
        said = {rule.split()[0]: rule.split()[1:] for rule in page.policy.split("; ")}
        for name in ("style", "script"):
            digest = base64.b64encode(hashlib.sha256(page.texts[name].encode()).digest()).decode()
            assert said[f"{name}-src"] == [f"'sha256-{digest}'"]
        assert said["default-src"] == ["'none'"]

    def test_needs_nothing_from_elsewhere(self) -> None:
        page = example().to_html()
        assert re.findall(r"(?:src|href)=\"([^\"]*)\"", page) == ["#first"]
        assert "url(" not in page
        assert "@import" not in page

    def test_hostile_names_are_text(self) -> None:
        shown = dataclasses.replace(example(3, 1), title=HOSTILE, columns=(HOSTILE, HOSTILE), notes=(HOSTILE,))
        page = Parsed(shown.to_html())
        assert page.rows[-2] == HOSTILE
        assert set(page.texts) == {"style", "script", "application/json"}
        assert HOSTILE in json.loads(page.texts["application/json"])[-2][0][1][0][1]

    @pytest.mark.parametrize(("layers", "steps"), [(0, 1), (1, 1), (200, 1), (80, 20)])
    def test_other_sizes(self, layers: int, steps: int) -> None:
        assert len(Parsed(example(layers, steps).to_html()).cells) == (layers + 3) * steps * 2

    def test_nothing_at_all(self) -> None:
        assert "Nothing was measured." in EMPTY.to_html()


class TestPng:
    @staticmethod
    def drawn(shown: Heatmap, folder: Path) -> np.ndarray:
        shown.to_png(folder / "map.png")
        return image.imread(folder / "map.png")[..., :3]

    @pytest.mark.parametrize(("layers", "steps"), [(LAYERS, 10), (LAYERS, 20), (200, 1)])
    def test_rows_have_room_for_labels(self, layers: int, steps: int, tmp_path: Path) -> None:
        shown = example(layers, steps)
        height, width, _ = self.drawn(shown, tmp_path).shape
        label = 7 / 72 * 160  # a label of 7 points at 160 dots an inch
        assert height / len(shown.rows) > (label if layers <= LAYERS else label / 2)
        assert max(height, width) < 4000

    @pytest.mark.parametrize("shown", [example(1, 1), example(80, 10), example(0, 1), EMPTY], ids=lambda s: len(s.rows))
    def test_the_margin_is_blank(self, shown: Heatmap, tmp_path: Path) -> None:
        """Nothing is cut off."""
        picture = self.drawn(dataclasses.replace(shown, notes=("word " * 60, "x" * 500)), tmp_path)
        for edge in (picture[:20], picture[-20:], picture[:, :20], picture[:, -20:]):
            assert (edge == 1).all()

    def test_colours_and_marks(self, tmp_path: Path) -> None:
        picture = self.drawn(example(), tmp_path)
        for colour in (scale.LIGHT[0], scale.LIGHT[12], scale.LIGHT_BAD, "#0757d6"):
            want = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
            assert (abs(picture - want).max(axis=2) < 0.005).sum() > 100, colour

    def test_text_is_no_formula(self, tmp_path: Path) -> None:
        self.drawn(dataclasses.replace(example(2, 1), title=r"a $\frac$ b", notes=(r"$\nosuch$",)), tmp_path)

    def test_settings_of_the_user_do_not_matter(self, tmp_path: Path) -> None:
        want = self.drawn(example(4, 2), tmp_path)
        with mpl.rc_context({"figure.facecolor": "k", "text.color": "w", "savefig.bbox": "tight", "font.size": 30}):
            assert (self.drawn(example(4, 2), tmp_path) == want).all()

    def test_pyplot_and_the_backend_are_left_alone(self, tmp_path: Path) -> None:
        had = "matplotlib.pyplot" in sys.modules, mpl.rcParams._get("backend")
        self.drawn(example(4, 1), tmp_path)
        assert ("matplotlib.pyplot" in sys.modules, mpl.rcParams._get("backend")) == had

    def test_without_matplotlib(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "meta_path", [NoMatplotlib(), *sys.meta_path])
        with pytest.raises(InputError, match=r"pip install hfpatch\[plot\]"):
            example(2, 1).to_png(tmp_path / "map.png")
        assert list(tmp_path.iterdir()) == []


class NoMatplotlib:
    """An import system in which it is not installed."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


class TestScale:
    @given(st.floats(0, 3.4e38), st.sampled_from([448.0, 57344.0, 65504.0, 3.3895e38, 3.4028e38]))
    def test_every_finite_value_has_a_band(self, value: float, limit: float) -> None:
        assert 0 <= scale.band(scale.doublings(value, limit)) < scale.BANDS

    def test_one_band_a_doubling(self) -> None:
        rooms = [scale.doublings(65504.0 / 2**n, 65504.0) for n in range(20)]
        assert rooms == list(range(20))
        assert [scale.band(r) for r in rooms] == [*range(17), 16, 16, 16]

    @pytest.mark.parametrize(
        "colours", [(scale.LIGHT_BAD, *scale.LIGHT), (scale.DARK_BAD, *scale.DARK)], ids=["light", "dark"]
    )
    @pytest.mark.parametrize("lost", [None, 0, 1, 2], ids=["all", "no red", "no green", "no blue"])
    def test_lightness_alone_tells_the_order(self, colours: tuple[str, ...], lost: int | None) -> None:
        seen = [scale.luminance(_without(c, lost)) for c in colours]
        assert seen in (sorted(seen), sorted(seen, reverse=True))
        assert len(set(seen)) == len(seen)

    @pytest.mark.parametrize("colour", [*scale.LIGHT, *scale.DARK, scale.LIGHT_BAD, scale.DARK_BAD])
    def test_numbers_can_be_read_on_every_colour(self, colour: str) -> None:
        light, dark = sorted((scale.luminance(colour), scale.luminance(scale.ink(colour))), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, "WCAG 2 AA"


# Machado, Oliveira and Fernandes 2009, severity 1: what people without the red, green or blue receptor see
BLINDNESS = np.array(
    [
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    ]
)


def _without(colour: str, lost: int | None) -> str:
    if lost is None:
        return colour
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = (BLINDNESS[lost] @ linear).clip(0, 1)
    back = np.where(seen <= 0.0031308, seen * 12.92, 1.055 * seen ** (1 / 2.4) - 0.055)
    return "#" + "".join(f"{round(255 * c):02x}" for c in back)


class TestCell:
    @pytest.mark.parametrize(
        ("value", "short"),
        [(0.0, "0"), (1.0, "1"), (0.0123, "0.0123"), (123.4, "123"), (4094.2, "4094"), (9999.7, "1.0e4"),
         (65504.0, "6.6e4"), (1.2e-7, "1.2e-7"), (3.39e38, "3.4e38"), (None, "")],
    )  # fmt: skip
    def test_short(self, value: float | None, short: str) -> None:
        assert Cell(value, 65504.0, False, ()).short == short
        assert len(short) <= 6

    def test_sentence(self) -> None:
        assert Cell(4094.0, 65504.0, False, ()).sentence == "max |x| 4,094: 4.0 doublings left to 65,504."
        assert Cell(0.0, 65504.0, False, ()).sentence == "max |x| 0: all zero."
        assert Cell(2.0, 3.3895e38, False, ()).sentence == "max |x| 2: 127.0 doublings left to 3.389e+38."
        assert Cell(None, 65504.0, True, ()).sentence == "Nothing finite was measured."
        assert "Holds NaN or Inf" in Cell(1.0, 65504.0, True, ()).sentence


class TestFiles:
    def test_written_as_any_file_is(self, tmp_path: Path) -> None:
        file, plain = tmp_path / "a.txt", tmp_path / "b.txt"
        plain.touch()
        write_atomically(file, "één")
        assert file.read_bytes() == "één".encode()
        write_atomically(file, b"two")
        assert file.read_bytes() == b"two"
        assert file.stat().st_mode == plain.stat().st_mode
        assert set(tmp_path.iterdir()) == {file, plain}

    def test_permissions_are_kept(self, tmp_path: Path) -> None:
        file = tmp_path / "a.txt"
        file.touch(0o600)
        write_atomically(file, "x")
        assert file.stat().st_mode & 0o777 == 0o600

    def test_a_link_is_followed(self, tmp_path: Path) -> None:
        link, file = tmp_path / "link", tmp_path / "a.txt"
        file.write_text("old")
        link.symlink_to(file)
        write_atomically(link, "new")
        assert link.is_symlink()
        assert file.read_text() == "new"

    def test_a_pipe_stays_one(self, tmp_path: Path) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        with io.FileIO(os.open(pipe, os.O_RDWR)) as end:
            write_atomically(pipe, "x")
            assert end.read(1) == b"x"
        assert pipe.is_fifo()

    @pytest.mark.parametrize(
        ("name", "says"),
        [("no/a.txt", "there is no directory .*no; make it"), ("file/a.txt", "file is no directory"),
         (".", "it is a directory; name a file in it"), ("n" * 300, "File name too long")],
    )  # fmt: skip
    def test_a_place_that_cannot_be_written(self, tmp_path: Path, name: str, says: str) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(InputError, match=says):
            write_atomically(tmp_path / name, "x")
        assert list(tmp_path.iterdir()) == [tmp_path / "file"]

    @pytest.mark.parametrize(
        ("call", "error", "says"),
        [("open", PermissionError(13, "Permission denied"), "may not write in"),
         ("fsync", OSError(28, "No space left on device"), "No space left on device")],
    )  # fmt: skip
    def test_a_failure_keeps_the_old_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: OSError, says: str
    ) -> None:
        file = tmp_path / "a.txt"
        file.write_text("old")

        def fails(*_: object) -> None:
            raise error

        with monkeypatch.context() as patched, pytest.raises(InputError, match=says):
            patched.setattr(os, call, fails)
            write_atomically(file, "new")
        assert file.read_text() == "old"
        assert list(tmp_path.iterdir()) == [file]
