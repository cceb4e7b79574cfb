"""The real models of evidence.py: how each is loaded, what it is given, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from common import Row
from torch.nn import Embedding
from torch.nn.functional import cosine_similarity, cross_entropy, normalize
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from hfpatch.patching.verifying.answer import Answer, Batch, answer, prepared, score
from tests.real.inputs import RATE, TEXT, keep_rows, speech
from tests.real.weights import Name, checkpoint

ROWS = 2048
LARGE = 2**16
"""A vocabulary beyond this is cut to ROWS for the steps on a CPU."""
FRAMES = 32
"""Positions of Whisper's encoder in the steps on a CPU; it has 1,500."""
SPOKEN = 12
"""Tokens that Whisper may say."""
PROMPT = [50258, 50259, 50359, 50363]
"""Whisper's start, English, transcribe, no timestamps."""
PAIRS = (
    ("The harbour was quiet in the early morning.", "Nothing moved in the port at dawn."),
    ("A boy counted the fish and wrote down the numbers.", "The catch was noted in a book by a child."),
    ("The men stayed at home and mended their sails.", "Nobody went out; the crews repaired canvas."),
    ("float16 cannot hold numbers above 65,504.", "Half precision overflows at about 6.5e4."),
)


@dataclass(frozen=True)
class Subject:
    """A real model and what it is asked. A causal language model, unless a derived class says otherwise.

    Attributes:
        title: Its name on the page.
        checkpoint: Its name in tests/real/weights.py.
        device: Where it runs.
        tokens: Length of the text of the forward pass.
        step_tokens: Length of the text of a step on a CPU.
    """

    title: str
    checkpoint: Name
    device: torch.device
    tokens: int
    step_tokens: int

    error: ClassVar[str] = "KL"
    """Column of the distance from float32 that the ways are compared by."""
    equal: ClassVar[str] = "text equal"
    """Column that says whether what `say` returns is float32's."""

    def load(self, dtype: torch.dtype) -> Any:
        """The model as a user loads it (rotary tables stay float32)."""
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint(self.checkpoint), dtype=dtype)
        return model.to(self.device).eval()

    def batch(self, model: Any) -> Batch:
        """The text and its first half, padded; padding has no label."""
        return _padded(model, self._ids[:, : self.tokens])

    def small(self, model: Any) -> Batch:
        """What a step is given. On a CPU a short text, and a large vocabulary is cut."""
        if self.device.type != "cpu":
            return self.batch(model)
        ids = self._ids[:, : self.step_tokens]
        return _padded(model, keep_rows(model, ids, ROWS) if model.config.vocab_size > LARGE else ids)

    def answer(self, model: Any, batch: Batch) -> Answer:
        """Its logits, and its own loss."""
        return answer(model, batch.inputs)

    def loss(self, model: Any, batch: Batch) -> torch.Tensor:
        """Its own loss, with a graph."""
        return model(**batch.inputs).loss

    def judged(self, mine: Answer, exact: Answer, batch: Batch) -> Row:
        """How far an answer is from float32's, over real tokens."""
        found = score("", mine, exact, batch.real)
        return {"loss": found.loss, "KL": found.kl, "top-1": found.top1, "finite": found.finite}

    def say(self, model: Any) -> torch.Tensor:
        """16 greedy tokens after 24 of the text."""
        prompt = self._ids[:, :24]
        words: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16, "min_new_tokens": 16, "pad_token_id": 0}
        return model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **words)[:, 24:]

    @cached_property
    def _ids(self) -> torch.Tensor:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint(self.checkpoint))
        return tokenizer(TEXT, return_tensors="pt")["input_ids"].to(self.device)


def _padded(model: Any, ids: torch.Tensor) -> Batch:
    mask = torch.ones_like(ids).repeat(2, 1)
    mask[1, ids.shape[1] // 2 :] = 0
    return prepared(model, {"input_ids": ids.repeat(2, 1) * mask, "attention_mask": mask, "use_cache": False})


@dataclass(frozen=True)
class Speech(Subject):
    """Whisper on vowels; the labels are what it says in float32."""

    equal: ClassVar[str] = "transcript equal"

    def load(self, dtype: torch.dtype) -> Any:
        model: Any = WhisperForConditionalGeneration.from_pretrained(checkpoint(self.checkpoint), dtype=dtype)
        return model.to(self.device).eval()

    def batch(self, model: Any) -> Batch:
        return self._heard(model, model.config.max_source_positions)

    def small(self, model: Any) -> Batch:
        if self.device.type == "cpu":
            model.config.max_source_positions = FRAMES
            encoder = model.model.encoder
            encoder.embed_positions = Embedding.from_pretrained(encoder.embed_positions.weight[:FRAMES].detach())
        return self.batch(model)

    def say(self, model: Any) -> torch.Tensor:
        prompt = torch.tensor([PROMPT], device=self.device)
        sound = self._features.to(self.device, model.dtype)
        return model.generate(sound, decoder_input_ids=prompt, do_sample=False, max_new_tokens=SPOKEN)

    @cached_property
    def _features(self) -> torch.Tensor:
        """`[1, 80, 3000]`, as Whisper reads sound; without autocast, which its products would obey."""
        with torch.autocast("cpu", enabled=False):
            return WhisperFeatureExtractor()(speech(), sampling_rate=RATE, return_tensors="pt").input_features

    def _heard(self, model: Any, positions: int) -> Batch:
        sound = self._features[:, :, : 2 * positions].to(self.device, model.dtype)
        return prepared(model, {"input_features": sound, "labels": self._labels, "use_cache": False})

    @cached_property
    def _labels(self) -> torch.Tensor:
        said = self.say(self.load(torch.float32))
        return torch.cat([torch.tensor([PROMPT[1:]], device=self.device), said[:, -SPOKEN:]], 1)


@dataclass(frozen=True)
class Sentences(Subject):
    """An encoder whose mean over real tokens is a sentence's embedding; its loss tells pairs apart, scaled by 20."""

    error: ClassVar[str] = "relative error"
    equal: ClassVar[str] = "nearest sentences equal"

    def load(self, dtype: torch.dtype) -> Any:
        model: Any = AutoModel.from_pretrained(checkpoint(self.checkpoint), dtype=dtype)
        return model.to(self.device).eval()

    def batch(self, model: Any) -> Batch:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint(self.checkpoint))
        words = tokenizer([s for side in zip(*PAIRS, strict=True) for s in side], padding=True, return_tensors="pt")
        return Batch(dict(words.to(self.device)), None)

    def small(self, model: Any) -> Batch:
        return self.batch(model)

    def answer(self, model: Any, batch: Batch) -> Answer:
        return Answer(_embedded(model, batch), self.loss(model, batch), None)

    def loss(self, model: Any, batch: Batch) -> torch.Tensor:
        left, right = _embedded(model, batch).chunk(2)
        return cross_entropy(20 * _products(left, right), torch.arange(len(left), device=self.device))

    def judged(self, mine: Answer, exact: Answer, batch: Batch) -> Row:
        a, b = mine.logits.double(), exact.logits.double()
        return {
            "loss": None if mine.loss is None else float(mine.loss),
            "relative error": float((a - b).norm() / b.norm()),
            "1 - cosine": float(1 - cosine_similarity(a, b).min().clamp(max=1)),
            "finite": bool(a.isfinite().all()),
        }

    def say(self, model: Any) -> torch.Tensor:
        """The nearest other sentence of each."""
        found = _embedded(model, self.batch(model))
        return _products(found, found).fill_diagonal_(-1).argmax(-1)


def _embedded(model: Any, batch: Batch) -> torch.Tensor:
    """Embeddings `[sentences, width]` of length 1, pooled in float32."""
    mask = batch.inputs["attention_mask"].unsqueeze(-1)
    hidden = model(**batch.inputs).last_hidden_state.float()
    return normalize((hidden * mask).sum(1) / mask.sum(1))


def _products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Cosines `[left, right]` of embeddings, in float32 under autocast too."""
    with torch.autocast(left.device.type, enabled=False):
        return left @ right.T
