"""The real checkpoints and the tokens of one pinned text, for every test in this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from transformers import AutoTokenizer

from tests.real.inputs import TEXT
from tests.real.weights import checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


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
