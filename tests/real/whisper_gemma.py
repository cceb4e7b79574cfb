"""A speech LLM of real parts: the encoder of Whisper base, a projector, and Gemma 3 270M, with LoRA in both.

Two things are cut so that a CPU trains it in seconds, and every weight that is left is real: the encoder has the first
`POSITIONS` rows of its table of positions, the language model the `ROWS` rows of its vocabulary that the text needs.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from peft import get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

import hfpatch
from tests.conftest import load_script
from tests.real.inputs import RATE, TEXT, keep_rows, speech
from tests.real.weights import checkpoint

if TYPE_CHECKING:
    from torch import Tensor

ROWS = 1024
POSITIONS = 10
"""Of the encoder: each hears two frames of 10 ms, and the projector reads windows of five."""
SAID = 6
"""Tokens of an utterance, after BOS."""


def language_model(dtype: torch.dtype = torch.float32) -> Any:
    """Gemma 3 270M with the rows of `ids`."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint("gemma3-270m"), dtype=torch.float32)
    keep_rows(model, _tokens(), ROWS)
    model.config.pad_token_id = 0
    return model.to(dtype)


def ids() -> Tensor:
    """The tokens of the pinned text in the numbering of the rows that are kept, [tokens]; the first is BOS."""
    tokens = _tokens()
    return torch.searchsorted(tokens.unique(), tokens)


@cache
def _tokens() -> Tensor:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint("gemma3-270m"))
    return tokenizer(TEXT, return_tensors="pt")["input_ids"][0]


def speech_llm(dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Whisper's encoder, a new projector drawn by a seed, and the language model, whose weights have a dtype."""
    whisper: Any = WhisperForConditionalGeneration.from_pretrained(checkpoint("whisper-base"), dtype=torch.float32)
    encoder = whisper.model.encoder
    table = encoder.embed_positions.weight[:POSITIONS].detach().clone()
    encoder.embed_positions = torch.nn.Embedding.from_pretrained(table)
    encoder.max_source_positions = encoder.config.max_source_positions = POSITIONS
    torch.manual_seed(seed)
    return load_script("examples/speech_gemma.py").SpeechLLM(language_model(dtype), encoder)


def with_lora(model: Any, **kwargs: Any) -> Any:
    """LoRA on every map, those of an encoder too, by `hfpatch.lora_config`; the same at each call."""
    torch.manual_seed(1)
    return get_peft_model(model, hfpatch.lora_config(model, r=8, scope="all", verbose=False, **kwargs))


def rows() -> list[dict[str, Tensor]]:
    """Two utterances: `features [mels, frames]` of a vowel, `input_ids [tokens]` after it, and `labels`."""
    read: Any = WhisperFeatureExtractor(chunk_length=1)
    sound, tokens = speech(3.0), ids()
    found: list[dict[str, Tensor]] = []
    for number in range(2):
        heard = read(sound[number * RATE :][:RATE], sampling_rate=RATE, return_tensors="pt")["input_features"][0]
        features = heard[:, 60 : 60 + 2 * POSITIONS]
        said = torch.cat([tokens[:1], tokens[1 + SAID * number :][:SAID]])
        labels = said.clone()
        labels[0] = -100
        found.append({"features": features, "input_ids": said, "labels": labels})
    return found


def batch() -> dict[str, Tensor]:
    """The two utterances as one batch."""
    return {name: torch.stack([row[name] for row in rows()]) for name in rows()[0]}


def documents() -> list[list[int]]:
    """Four documents of several lengths from the text, each after a BOS."""
    tokens, starts = ids(), [1, 10, 24, 31, 41]
    return [torch.cat([tokens[:1], tokens[a:b]]).tolist() for a, b in itertools.pairwise(starts)]


def padded(given: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch of documents padded on the right, as a collator makes it; padding has no label."""
    longest = max(len(row["input_ids"]) for row in given)

    def filled(values: list[int], by: int) -> list[int]:
        return [*values, *[by] * (longest - len(values))]

    listed = [row["input_ids"] for row in given]
    return {
        "input_ids": torch.tensor([filled(row, 0) for row in listed]),
        "attention_mask": torch.tensor([filled([1] * len(row), 0) for row in listed]),
        "labels": torch.tensor([filled(row, -100) for row in listed]),
    }


def text_batch() -> dict[str, Tensor]:
    """The documents as one padded batch."""
    return padded([{"input_ids": row} for row in documents()])
