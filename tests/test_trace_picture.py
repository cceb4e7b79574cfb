"""The table, the figures by path, and the picture of a trace: a curve for one step, a heat map for several."""

from __future__ import annotations

import base64
import hashlib
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfpatch
from hfpatch.errors import InputError
from hfpatch.report.curve import Curve
from hfpatch.report.heatmap import Heatmap
from hfpatch.report.series import Line
from hfpatch.testing import example_inputs, tiny_model
from hfpatch.tracing.showing import picture
from tests.heat import HOSTILE


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny_model("llama").train()


def steps(model: nn.Module, count: int, level: Any = "modules") -> Any:
    batch = example_inputs(model)
    with hfpatch.trace(model, level=level) as t:
        for _ in range(count):
            model(**batch).loss.backward()
            model.zero_grad()
    return t


@pytest.fixture(scope="module")
def one(llama: nn.Module) -> Any:
    return steps(llama, 1)


@pytest.fixture(scope="module")
def many(llama: nn.Module) -> Any:
    return steps(llama, 3)


class TestTable:
    def test_a_row_for_every_block_in_the_order_they_ran(self, one: Any) -> None:
        names = [row[0] for row in one.report().rows]
        layers = [f"model.layers.{i}" for i in range(4)]
        assert names == ["model.embed_tokens", "model.rotary_emb", *layers, "model.norm", "lm_head", "(model)"]

    def test_a_stage_that_makes_a_tensor_has_a_row(self) -> None:
        class Tower(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(
                    nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, dropout=0.0) for _ in range(2)
                )

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for layer in self.layers:
                    x = layer(x)
                return x * 3

        class Both(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.tower, self.head = Tower(), nn.Linear(8, 2)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.head(self.tower(x))

        model = Both()
        t = hfpatch.trace(model)
        with t:
            model(torch.randn(2, 3, 8)).sum().backward()
        names = [row[0] for row in t.report().rows]
        assert names == ["tower.layers.0", "tower.layers.1", "tower", "head", "(model)"]

    def test_the_forward_figures_stay_when_gradients_are_bad(self, llama: nn.Module) -> None:
        batch = example_inputs(llama)
        with hfpatch.trace(llama) as t:
            (llama(**batch).loss * float("nan")).backward()
        llama.zero_grad()
        rows = {row[0]: row for row in t.report().rows}
        for at in range(4):
            row = rows[f"model.layers.{at}"]
            assert float(row[1]) > 0
            assert float(row[2]) > 0
            assert row[-1] in ("not finite", "starts here")

    def test_rms_against_the_tensors_themselves(self, llama: nn.Module, one: Any) -> None:
        kept: dict[str, torch.Tensor] = {}
        handle = llama.model.layers[2].register_forward_hook(lambda _m, _a, out: kept.update(out=out.detach()))
        llama(**example_inputs(llama))
        handle.remove()
        want = float(kept["out"].double().square().mean().sqrt())
        assert one["model.layers.2"].output.rms == pytest.approx(want, rel=1e-4)
        (row,) = [row for row in one.report().rows if row[0] == "model.layers.2"]
        assert float(row[1]) == pytest.approx(want, rel=1e-3)


class TestByPath:
    def test_figures(self, one: Any) -> None:
        seen = one["model.layers.2"]
        layer = one["model.layers.1"]
        assert seen.input == layer.output
        assert seen.input_gradient == layer.gradient
        assert seen.output.size == seen.input.size
        assert "gradient of output" in str(seen)
        assert seen.to_dict()["path"] == "model.layers.2"

    def test_a_module_that_returns_the_tensor_of_another(self, one: Any) -> None:
        attention, projection = one["model.layers.0.self_attn"], one["model.layers.0.self_attn.o_proj"]
        assert attention.output == projection.output

    def test_weights_and_their_gradients(self, one: Any) -> None:
        roles = [row[1] for row in one["model.layers.0.self_attn.o_proj"].tensors]
        assert {"parameter", "gradient of parameter"} <= set(roles)

    def test_an_unknown_path(self, one: Any) -> None:
        with pytest.raises(InputError, match=r"no module of this path; near it are .*model\.layers\.2"):
            one["model.layer.2"]
        with pytest.raises(InputError, match="want a string"):
            one[2]

    def test_what_was_not_measured(self, llama: nn.Module) -> None:
        t = steps(llama, 1, level="blocks")
        assert t["model.layers.0"].output is not None
        with pytest.raises(InputError, match="was not measured"):
            t["model.layers.0.mlp"]


class TestPicture:
    def test_one_step_is_a_curve_and_several_a_heat_map(self, one: Any, many: Any, tmp_path: Path) -> None:
        for trace, kind in ((one, "<svg"), (many, 'role="grid"')):
            trace.to_html(tmp_path / "t.html")
            page = (tmp_path / "t.html").read_text()
            assert kind in page
            assert "<details>" in page
            assert "self_attn.q_proj" in page
            assert "prefers-color-scheme: dark" in page
            assert not re.findall(r"(?:src|href)=\"[^#\"]", page), "nothing from elsewhere"
            trace.plot(tmp_path / "t.png")
            assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")

    def test_in_a_notebook(self, one: Any, many: Any) -> None:
        for trace in (one, many):
            html = trace._repr_html_()
            (page,) = re.findall(r'<iframe srcdoc="([^"]*)"', html)
            assert "<!doctype html>" in unescape(page)
            assert "<table>" in html

    def test_float32_and_bfloat16_are_not_one_colour(self, many: Any) -> None:
        bands = {cell.band for cell in shown(many).cells.values()}
        assert len(bands) > 3
        low = steps(tiny_model("llama", seed=1).bfloat16().train(), 2)
        assert len({cell.band for cell in shown(low).cells.values()}) > 3
        assert "below the largest" in shown(low).measure

    def test_a_dtype_that_was_asked_for(self, many: Any) -> None:
        wanted = shown(many, "float16")
        assert {cell.limit for cell in wanted.cells.values()} == {65504.0}
        assert "float16" in wanted.measure
        with pytest.raises(InputError, match=r"dtype='int8': want one of float32, bfloat16"):
            many.to_html("/nowhere/t.html", dtype="int8")

    def test_the_curve_holds_the_figures(self, one: Any) -> None:
        drawn = shown(one, "float16")
        assert isinstance(drawn, Curve)
        forward, backward = drawn.lines
        at = drawn.rows.index("model.layers.2")
        seen = one["model.layers.2"]
        assert (forward.rms[at], forward.largest[at]) == (seen.output.rms, seen.output.largest)
        assert backward.rms[at] == seen.gradient.rms
        assert [name for name, _ in drawn.limits] == ["largest of float16", "smallest of float16"]

    def test_hostile_names_are_text(self, tmp_path: Path) -> None:
        line = Line("forward", (1.0, 2.0), (3.0, None), (False, True))
        drawn = Curve(HOSTILE, (HOSTILE, "b"), (line,), (("largest of float16", 65504.0),), 0, (HOSTILE,), ())
        page = drawn.to_html()
        assert "<script" not in page
        (style,) = re.findall(r"<style>(.*)</style>", page, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
        assert f"style-src 'sha256-{digest}'" in unescape(page)
        assert "style=" not in page, "the policy forbids it"
        drawn.to_png(tmp_path / "t.png")

    def test_nothing_at_all(self, tmp_path: Path) -> None:
        empty = Curve("trace", (), (), (), None, (), ())
        assert "Nothing was measured." in empty.to_html()
        empty.to_png(tmp_path / "t.png")

    def test_a_limit_far_away_does_not_flatten_the_curve(self) -> None:
        line = Line("forward", (1.0, 20.0), (3.0, 50.0), (False, False))
        drawn = Curve(
            "t", ("a", "b"), (line,), (("largest of float32", 3.4e38), ("largest of e4m3", 448.0)), None, (), ()
        )
        assert drawn.decades(line) == (0, 3)


def shown(trace: Any, dtype: str | None = None) -> Heatmap | Any:
    return picture.picture("t", trace.steps, trace.places, trace.findings, [], dtype)
