"""What a layer's code says of how its parts read the residual stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hfpatch.lab.tiny import tiny_model
from hfpatch.model.edges import edges
from hfpatch.model.reads import Reading, begins_with_norm, calls, calls_as_they_end, reading_of
from hfpatch.model.roles import Stack
from hfpatch.model.survey import Survey


def stack(architecture: str) -> Stack:
    (found,) = Survey(tiny_model(architecture)).stacks[""]
    return found


def named(places: Any) -> set[str]:
    """The last two names of each path, without indices."""
    return {".".join(n for n in path.split(".")[-3:] if not n.isdigit()) for path, _ in places}


@pytest.mark.parametrize(
    ("architecture", "raw"),
    [
        ("llama", set[str]()),
        ("gemma2", set[str]()),
        ("olmo2", {"layers.self_attn", "layers.mlp"}),
        ("gemma4_text", {"layers.per_layer_input_gate"}),
        ("gemma3n_text", {"layers.altup", "layers.per_layer_input_gate"}),  # AltUp is called by its methods
        ("megatron-bert", set[str]()),
    ],
)
def test_parts_that_read_the_raw_stream(architecture: str, raw: set[str]) -> None:
    assert named(stack(architecture).raw_readers) == raw


@pytest.mark.parametrize(
    ("architecture", "norms", "reader"),
    [
        ("megatron-bert", "attention.ln", "attention.self"),
        ("roberta-prelayernorm", "attention.LayerNorm", "attention.self"),
        ("dbrx", "norm_attn_norm.norm_2", "norm_attn_norm.attn"),
        ("longcat_flash", "input_layernorm", "self_attn"),
    ],
)
def test_a_part_that_begins_with_a_norm_is_opened(architecture: str, norms: str, reader: str) -> None:
    found = stack(architecture)
    assert norms in named(found.layer_norms)
    assert reader in named(found.readers)


@pytest.mark.parametrize(("architecture", "casts"), [("mamba", True), ("nemotron_h", True), ("llama", False)])
def test_layers_that_cast_the_stream(architecture: str, casts: bool) -> None:
    assert reading_of(stack(architecture).layers[0][1]).casts is casts


@pytest.mark.parametrize(("architecture", "norm"), [("gemma4_text", "norm"), ("bloom", "ln_f"), ("llama", "norm")])
def test_the_final_norm_is_the_last_that_is_called(architecture: str, norm: str) -> None:
    final = stack(architecture).final_norm
    assert final is not None
    assert final[0].rpartition(".")[2] == norm


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(4), nn.Dropout()
        self.side, self.mlp, self.gate = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, flag: bool = True) -> torch.Tensor:
        y = self.norm(x) if flag else x
        y = self.drop(self.mlp(y)) + self.side(2.0 * x.view(-1, 4))
        x += y
        return x + self.gate(hidden=x[:1])


def test_a_layer_of_ones_own() -> None:
    assert reading_of(Layer()) == Reading(frozenset({"norm", "side", "gate"}))
    assert calls(Layer) == ("norm", "drop", "mlp", "side", "gate")
    assert not begins_with_norm(Layer())


def test_code_that_cannot_be_read() -> None:
    space: dict[str, Any] = {"nn": nn}
    exec("class Hidden(nn.Module):\n    def forward(self, x):\n        return self.side(x)", space)  # noqa: S102
    assert reading_of(space["Hidden"]()) == Reading()


def test_where_a_raw_stream_leaves() -> None:
    survey = Survey(tiny_model("llava"))
    tower, llm = (
        next(s for s in survey.submodels if s.architecture == name) for name in ("clip_vision_model", "llama")
    )
    found = {path for path, _ in edges(survey, tower)}
    assert {"model.multi_modal_projector.linear_1", "model.vision_tower.post_layernorm"} <= found
    assert not any(path.startswith(("model.language_model", "lm_head")) or "layers" in path for path in found)
    assert list(edges(survey, llm)) == []


def test_calls_come_in_the_order_in_which_they_end() -> None:
    """The last map of `self.w2(F.silu(self.w1(x)) * self.w3(x))` is `w2`, which the source names first."""
    feed: Any = tiny_model("lfm2").model.layers[0].feed_forward
    assert calls_as_they_end(type(feed)) == ("w1", "w3", "w2")
    attention: Any = tiny_model("llama").model.layers[0].self_attn
    assert calls_as_they_end(type(attention))[-1] == "o_proj"
