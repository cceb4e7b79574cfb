"""The models of the examples: those that were asked for, or tiny random ones where these cannot be read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch

from hfpatch.testing import tiny_model

TINY = "tiny"
"""What to give for the tiny random model."""

TEXT = (
    "The harbour was quiet when the first boats came back in the early morning. Two men carried the nets to the wall "
    "and spread them out to dry, while a boy counted the fish and wrote the numbers in a small book. By noon the "
    "market was full of people, and most of the catch had been sold. In the afternoon the wind turned to the north."
)

T = TypeVar("T")


@dataclass
class Language:
    """A language model in float32, in evaluation mode, and its tokenizer.

    Attributes:
        model: The model.
        tokenizer: None for a tiny model, whose tokens are words.
        real: False for a tiny random model.
    """

    model: Any
    tokenizer: Any
    real: bool

    def ids(self, text: str = TEXT, tokens: int | None = None) -> torch.Tensor:
        """Return the first tokens of a text, `[1, tokens]`; of a tiny model, a number for each word."""
        if self.tokenizer is not None:
            return self.tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
        rows = self.model.get_input_embeddings().num_embeddings
        return torch.tensor([[3 + sum(map(ord, word)) % (rows - 3) for word in text.split()][:tokens]])


def language_model(asked: str, option: str, architecture: str, **config: Any) -> Language:
    """Return the language model of a hub id or a folder; where it cannot be read, a tiny one, and say so.

    Args:
        asked: A hub id, a folder, or `tiny`.
        option: The option that asked for it, for the sentence.
        architecture: Of the tiny model.
        config: Of the tiny model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def real() -> Language:
        model = AutoModelForCausalLM.from_pretrained(asked, dtype=torch.float32)
        return Language(model.eval(), AutoTokenizer.from_pretrained(asked), real=True)

    def small() -> Language:
        return Language(tiny_model(architecture, **config), None, real=False)

    return read(asked, option, real, small)


def read(asked: str, option: str, real: Callable[[], T], small: Callable[[], T]) -> T:
    """Return `real()`; if nothing can be read, say in a sentence what to give, and return `small()`."""
    if asked == TINY:
        return small()
    try:
        if not Path(asked).is_dir():
            _reachable(asked)
        return real()
    except (OSError, ValueError) as error:  # no network, no such model, not a model's folder
        why = (str(error).splitlines() or [type(error).__name__])[0]
        print(
            f"{option} {asked} cannot be read here ({why}): give {option} a folder that holds the weights, or a hub id "
            f"with a network to read it; a tiny random model runs instead, as with {option} {TINY}",
            file=sys.stderr,
        )
        return small()


def _reachable(asked: str) -> None:
    """Raise at once if a hub id is not in the cache and there is no network: loading would try for half a minute."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.constants import ENDPOINT

    if try_to_load_from_cache(asked, "config.json") is None:
        with suppress(HTTPError):  # the hub answered
            urlopen(Request(ENDPOINT, method="HEAD"), timeout=5).close()


def speech_encoder(asked: str, states: int, mels: int = 80) -> Any:
    """Return Whisper's encoder in float32, its positions cut to those of one utterance.

    Args:
        asked: A hub id or folder of a Whisper, or `tiny`.
        states: What it gives for an utterance of twice as many frames: 50 a second.
        mels: Bands of the tiny one.
    """
    from transformers import WhisperConfig, WhisperModel
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    def real() -> Any:
        found = WhisperModel.from_pretrained(asked, dtype=torch.float32).encoder
        first = found.embed_positions.weight[:states].detach().clone()
        found.embed_positions = torch.nn.Embedding.from_pretrained(first)
        found.config.max_source_positions = found.max_source_positions = states
        return found.eval()

    def small() -> Any:
        torch.manual_seed(0)
        sizes = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
        return WhisperEncoder(WhisperConfig(**sizes, num_mel_bins=mels, max_source_positions=states)).eval()

    return read(asked, "--encoder", real, small)


def keep_rows(model: Any, ids: torch.Tensor, rows: int) -> torch.Tensor:
    """Cut a vocabulary in place to `rows` rows, those of a text among them: a large one takes most of a step on a CPU.

    Args:
        model: A language model; one with no more rows is left as it is.
        ids: The text, in the numbering of the model.
        rows: Number of rows to keep.

    Returns:
        The text in the new numbering.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.num_embeddings <= rows:
        return ids
    used = ids.unique()
    rest = torch.arange(embedding.num_embeddings)
    kept = torch.cat([used, rest[~torch.isin(rest, used)]])[:rows]
    tables = [part.weight[kept].detach().clone() for part in (embedding, head)]
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for part, table in zip((model.get_input_embeddings(), model.get_output_embeddings()), tables, strict=True):
            part.weight.copy_(table)  # the same rows twice, if they are tied
    return torch.searchsorted(used, ids)


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]], title: str = "") -> None:
    """Print rows under headings."""
    import hfpatch

    print(hfpatch.Sheet(title, columns, tuple(rows)), flush=True)


def progress(words: str) -> None:
    """Say on stderr where an example is."""
    print(f"... {words}", file=sys.stderr, flush=True)
