"""Cases 32 and 62: what runs in float16 and keeps its stream there is named, whoever wrote it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import WhisperModel

import hfpatch
from hfpatch.lab.tiny import tiny_model
from hfpatch.model.survey import Survey
from hfpatch.patching.unserved import unserved
from tests.test_embed import WHISPER
from tests.test_feeding import Speech, Stages, torchs
from tests.test_fp16 import Gated


def rows(model: nn.Module, **words: Any) -> list[tuple[str, str, str, bool]]:
    return [(r.path, r.cls, r.architecture, r.refused) for r in unserved(Survey(model), **words)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "path", "cls", "tower"),
    [("emu3", "model.vqmodel.encoder.down_block.down.*.block", "Emu3VQVAEResnetBlock", "emu3_vqgan")],
)
def test_a_float16_tower_is_named_and_what_is_served_is_not(architecture: str, path: str, cls: str, tower: str) -> None:
    model = tiny_model(architecture).half()
    assert (path, cls, tower, False) in rows(model)
    assert rows(model, compute_dtype=torch.bfloat16) == []
    (row,) = (row for row in unserved(Survey(model)) if row.path == path)
    assert str(row) == (
        f"{path}, {cls} of {tower}, runs in float16 and is not supported: "
        "no case proves the patch for this architecture"
    )
    assert row.to_dict() == {
        "path": path, "class": cls, "architecture": tower, "dtype": "float16", "refused": False, "reason": row.reason,
    }  # fmt: skip
    model.model.vqmodel.float()
    assert rows(model) == []
    assert (path, cls, tower, False) in rows(model, compute_dtype=torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", ["llama", "gpt2", "t5", "whisper", "qwen3_next", "mixtral", "llava", "qwen2_audio"]
)
def test_a_served_model_has_no_row(architecture: str) -> None:
    model = tiny_model(architecture).half()
    assert rows(model) == []
    hfpatch.apply(model, verbose=False)
    assert rows(model) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["olmo2", "llava", "llama"])
def test_other_dtypes_have_no_row(architecture: str, dtype: torch.dtype) -> None:
    assert rows(tiny_model(architecture).to(dtype)) == []


def test_a_refused_architecture_says_why() -> None:
    (row,) = unserved(Survey(tiny_model("flex_olmo").half()))
    assert (row.path, row.refused) == ("model.layers", True)
    assert "it raises" in row.reason


def test_layers_that_somebody_else_wrote() -> None:
    model = tiny_model("llama").half()
    for layer in model.model.layers:
        layer.__class__ = Gated
    (row,) = unserved(Survey(model))
    assert (row.path, row.refused) == ("model.layers", True)
    assert row.reason.startswith("it was not tested with tests.test_fp16.Gated.forward")


def test_encoders_outside_transformers() -> None:
    assert rows(Speech(torchs(24)).half()) == [("encoder.layers", "TransformerEncoderLayer", "", False)]
    assert [r[0] for r in rows(Speech(Stages(24)).half())] == ["encoder.stages.*"]
    model = Speech(torchs(24)).half()
    model.encoder.float()
    assert rows(model) == []


def test_a_speech_encoder_beside_a_language_model() -> None:
    model = nn.ModuleDict({"speech": WhisperModel(WHISPER).encoder, "llm": tiny_model("llama")}).half()
    assert rows(model) == []  # whisper's encoder is served
    model["llm"].float()
    assert rows(model) == []


def test_layers_that_cannot_be_looked_through(ids: torch.Tensor) -> None:
    from tests.test_wrapped import Around, CastsByHand, wrapped

    assert rows(wrapped("llama", Around, ids)) == []
    (row,) = unserved(Survey(wrapped("llama", CastsByHand, ids)))
    assert (row.path, row.refused) == ("model.layers", True)
    assert row.reason.startswith("model.layers.0 is a CastsByHand")
