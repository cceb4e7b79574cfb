"""The real checkpoints and one pinned text, for every test in this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from transformers import AutoTokenizer

from tests.real.weights import checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

TEXT = (
    "The harbour was quiet when the first boats came back in the early morning. Two men carried the nets "
    "to the wall and spread them out to dry, while a boy counted the fish and wrote the numbers in a small "
    "book. By noon the market was full of people, and most of the catch had been sold. In the afternoon the "
    "wind turned to the north and the water grew rough, so the men who had meant to go out again stayed at "
    "home and mended their sails. An old woman who had lived by the sea all her life said that it would snow "
    "before the end of the week, and nobody laughed, because she had been right the year before."
)


@pytest.fixture(scope="session")
def gemma_dir() -> Path:
    """Gemma 3 270M (pre-trained, not instruction-tuned), float32."""
    return checkpoint("gemma3-270m")


@pytest.fixture(scope="session")
def smollm_dir() -> Path:
    """SmolLM2 135M Instruct (Llama architecture), float32."""
    return checkpoint("smollm2-135m")


@pytest.fixture(scope="session")
def whisper_dir() -> Path:
    """Whisper base, multilingual, float32."""
    return checkpoint("whisper-base")


@pytest.fixture(scope="session")
def gemma_tokens(gemma_dir: Path) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` of TEXT, (1, tokens) int64 each, with the BOS that Gemma needs."""
    tokenizer = AutoTokenizer.from_pretrained(gemma_dir)
    tokens = dict(tokenizer(TEXT, return_tensors="pt"))
    assert tokens["input_ids"][0, 0] == tokenizer.bos_token_id, "Gemma's loss is meaningless without its BOS"
    return tokens


@pytest.fixture(scope="session")
def smollm_tokens(smollm_dir: Path) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` of TEXT, (1, tokens) int64 each; this tokenizer adds no BOS."""
    return dict(AutoTokenizer.from_pretrained(smollm_dir)(TEXT, return_tensors="pt"))
